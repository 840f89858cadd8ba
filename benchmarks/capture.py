"""Capture against the same engine's plain prefill, and against a transformers forward.

    python -m benchmarks.capture configs/smollm2_cpu.yaml

Runs over rows of 01_data (make them first). One engine, one process: the rows are prefilled
plainly, then with capture (publishing and proving the shard included), twice each, the better of
two counted; then transformers runs the same rows with ``output_hidden_states``, one row at a time
and in batches of eight of similar length, the better of the two counted. What it costs that a shard
is known to be whole (row checksums, read back and compared, SHA-256, fsync, record, manifest) is
measured again on the shard captured; a run does it beside the next shard's computation, so its
share is the most it can cost. The last line is JSON.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3.artifact import open_artifact
from eagle3.capture import VerifierHead, capture_rows
from eagle3.contract import Wiring
from eagle3.engine import Engine, Sampling
from eagle3.files import sha256_file, write_json
from eagle3.fingerprint import open_verifier
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_layout import kept_offsets, row_checksum, row_parts
from eagle3.shards import Shard

NUM_ROWS = 192


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    verifier = open_verifier(config.verifier)
    artifact = open_artifact(config, "01_data", invocation)
    rows = TokenRows.load(artifact.path("rows.safetensors"))
    tokens = [rows.row(i)[0].tolist() for i in range(min(NUM_ROWS, rows.num_rows))]
    num_tokens = sum(map(len, tokens))
    wiring = Wiring.at_capture(config, verifier)
    head = VerifierHead(verifier, config.verifier.dtype)
    engine = Engine(config, verifier)

    def prefill() -> None:
        for _ in engine.generate(tokens, Sampling(temperature=0, max_new_tokens=1)):
            pass

    directory = tempfile.TemporaryDirectory(dir=config.run_dir)
    shard = Path(directory.name) / "shard-00000.safetensors"

    def capture() -> None:
        capture_rows(engine, wiring, head, tokens, shard)

    prefill()  # warm-up; capture stays installed once begun, so the plain runs come first
    prefill_s = min(seconds(prefill) for _ in range(2))
    capture_s = min(seconds(capture) for _ in range(2))
    engine.close()
    checks_s = check_seconds(shard)
    share = sum(checks_s.values()) / capture_s
    log("checks, seconds", **checks_s, capture=capture_s, share=f"{share:.2%}")
    directory.cleanup()
    transformers_s = transformers_forward(verifier.directory, tokens)

    rates = {
        "prefill": num_tokens / prefill_s,
        "capture": num_tokens / capture_s,
        "transformers": num_tokens / transformers_s,
    }
    log("tokens/s", **{name: round(rate) for name, rate in rates.items()})
    print(
        json.dumps(
            {
                "compared": "capture against plain prefill of the same engine, tokens/s",
                "capture_tokens_per_s": round(rates["capture"], 1),
                "prefill_tokens_per_s": round(rates["prefill"], 1),
                "transformers_tokens_per_s": round(rates["transformers"], 1),
                "ratio": round(rates["capture"] / rates["prefill"], 3),
                "ratio_to_transformers": round(rates["capture"] / rates["transformers"], 3),
                "checks_s": {name: round(value, 4) for name, value in checks_s.items()},
                "checks_share_of_capture": round(share, 4),
                "tokens": num_tokens,
            }
        )
    )


def check_seconds(path: Path) -> dict[str, float]:
    """Seconds of each thing that is done only to know a shard whole, done again on this one."""
    tensors = load_file(path)
    offsets, row_ids = tensors["row_offsets"], tensors["row_ids"].tolist()
    kept = kept_offsets(tensors["has_last_state"], offsets)

    def checksum_rows() -> None:
        for index, row_id in enumerate(row_ids):
            row_checksum(row_id, row_parts(tensors, index, offsets, kept))

    def read_back() -> None:
        shard = Shard.open(path)
        for index in range(shard.num_rows):
            shard.row(index)

    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    with open(copy, "rb") as file:
        fsync_s = seconds(lambda: os.fsync(file.fileno()))

    def write_record_and_manifest() -> None:
        for name in ("record.json", "manifest.json"):
            write_json(
                path.with_name(name), {"files": {path.name: {"bytes": 1, "sha256": "0" * 64}}}
            )

    return {
        "row_checksums": seconds(checksum_rows),
        "read_back": seconds(read_back),  # the same again of what was written
        "sha256": seconds(lambda: sha256_file(path)),
        "fsync": fsync_s,
        "record_and_manifest": seconds(write_record_and_manifest),
    }


def transformers_forward(directory: Path, tokens: list[list[int]]) -> float:
    """Seconds transformers takes for the same rows and all hidden states, its better way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).model
    by_length = sorted(tokens, key=len)

    def forward(batch_rows: int) -> None:
        with torch.inference_mode():
            for begin in range(0, len(by_length), batch_rows):
                batch = by_length[begin : begin + batch_rows]
                longest = len(batch[-1])
                ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
                mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in batch])
                model(ids, attention_mask=mask, output_hidden_states=True)

    forward(8)
    return min(seconds(lambda: forward(1)), seconds(lambda: forward(8)))


def seconds(work: Callable[[], None]) -> float:
    start_s = time.monotonic()
    work()
    return time.monotonic() - start_s


if __name__ == "__main__":
    run_script(main, __doc__)
