"""Capture the verifier's hidden states over 01's token rows, with a patched vLLM worker.

reads   01_data/rows.safetensors      token rows, training and validation
writes  02_hidden/shard-00000.safetensors, ...
            aux_hidden_states   verifier dtype [num_tokens, num_aux, hidden]
            last_hidden_states  verifier dtype [num_tokens, hidden]
            input_ids, row_ids, row_offsets

run     python 02_gen_hidden_states.py configs/smollm2_cpu.yaml
time    the verifier's prefill rate: the demo's 120K tokens in about a minute
disk    (aux layers + 1) x hidden x 2 bytes a token: 4.6 KB in the demo, 57 KB for Kimi-K2.5

If it stops, run the same command again: published shards are kept, at most one is computed twice.
"""

import json
import shutil
from pathlib import Path

from eagle3.capture import VerifierHead, compute_shard, finish_shard, record_path
from eagle3.config import Config
from eagle3.contract import Wiring
from eagle3.engine import Engine
from eagle3.errors import NoRoomError
from eagle3.files import format_bytes
from eagle3.rows import TokenRows
from eagle3.script import Invocation, Progress, log, run_script, stop_flag
from eagle3.shards import Shard, bytes_per_token
from eagle3.stage import Stage


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    with Stage(config, "02_hidden", invocation) as stage:
        if stage.done:
            return
        rows = TokenRows.load(stage.inputs["01_data"].path("rows.safetensors"))
        wiring = Wiring.at_capture(config, stage.verifier)
        plan = plan_shards(rows, config, stage.directory)
        records = {path: read_record(path) for path in plan}
        check_disk(rows, config, stage.directory, [p for p in plan if records[p]])
        if invocation.check:
            return

        missing = [path for path in plan if not records[path]]
        if missing:
            done_tokens = sum(record["tokens"] for record in records.values() if record)
            progress = Progress(int(rows.lengths.sum()), "tokens", done=done_tokens)
            head = VerifierHead(stage.verifier, config.verifier.dtype)
            engine = Engine(config, stage.verifier)
            pending = None
            for path in [*missing, None]:  # a shard is written while the next one is computed
                computed = None
                if path is not None:
                    tokens = [rows.row(i)[0].tolist() for i in plan[path]]
                    computed = compute_shard(engine, wiring, plan[path], tokens, path)
                if pending is not None:
                    records[pending.path] = finish_shard(engine, head, pending)
                    progress.advance(records[pending.path]["tokens"], shard=pending.path.name)
                pending = computed
                if stop_flag.signal_name and pending is not None:
                    finish_shard(engine, head, pending)
                stop_flag.raise_if_set()
            progress.close()
            log("captured", rate=f"{progress.rate:.0f} tokens/s")

        check_identities(rows, plan, records)
        near_ties = sum(record["near_ties"] for record in records.values())
        show(Shard.open(next(iter(plan))), stage.verifier, near_ties, rows.num_rows)
        stage.commit(
            files=[path.name for path in plan],
            checksums={path.name: record["sha256"] for path, record in records.items()},
            counts={
                "in": rows.num_rows,
                "out": sum(record["rows"] for record in records.values()),
                "dropped": {},
                "tokens": sum(record["tokens"] for record in records.values()),
                "next_token_near_ties": near_ties,
            },
            wiring=wiring,
        )


def plan_shards(rows: TokenRows, config: Config, directory: Path) -> dict[Path, list[int]]:
    """Whole rows, in order, into shards of about ``capture.shard_bytes``."""
    row_bytes = rows.lengths * token_bytes(config)
    plan: dict[Path, list[int]] = {}
    filled_bytes = config.capture.shard_bytes
    for index in range(rows.num_rows):
        if filled_bytes + row_bytes[index] > config.capture.shard_bytes:
            path = directory / f"shard-{len(plan):05d}.safetensors"
            plan[path], filled_bytes = [], 0
        plan[path].append(index)
        filled_bytes += row_bytes[index]
    return plan


def token_bytes(config: Config) -> int:
    num_aux = len(config.capture.aux_layer_ids)
    return bytes_per_token(num_aux, config.drafter.hidden_size, config.verifier.dtype)


def read_record(path: Path) -> dict | None:
    """A shard's record if shard and record are both there and of one size."""
    if not path.is_file() or not record_path(path).is_file():
        return None
    record = json.loads(record_path(path).read_text(encoding="utf-8"))
    return record if record["bytes"] == path.stat().st_size else None


def check_disk(rows: TokenRows, config: Config, directory: Path, kept: list[Path]) -> None:
    """Say what the stage needs, what is free and what it may use, before the engine starts."""
    needed_bytes = int(rows.lengths.sum()) * token_bytes(config)
    budget_bytes = config.capture.disk_budget_bytes
    kept_bytes = sum(path.stat().st_size for path in kept)
    existing = next(p for p in [directory, *directory.absolute().parents] if p.exists())
    free_bytes = shutil.disk_usage(existing).free
    log(
        "disk",
        needed=format_bytes(needed_bytes),
        published=format_bytes(kept_bytes),
        free=format_bytes(free_bytes),
        budget=format_bytes(budget_bytes),
    )
    for limit_bytes, what, fix in (
        (budget_bytes, "the budget", "raise capture.disk_budget_bytes or take fewer tokens"),
        (free_bytes + kept_bytes, "the free space", "free space, or point run.dir elsewhere"),
    ):
        if needed_bytes > limit_bytes:
            raise NoRoomError(
                f"the hidden states do not fit {what}",
                where=directory,
                expected=f"at least {format_bytes(needed_bytes)}",
                found=f"{what}: {format_bytes(limit_bytes)}",
                fix=fix,
            )


def check_identities(rows: TokenRows, plan: dict[Path, list[int]], records: dict) -> None:
    """Every row is in exactly one shard, and the tokens add up."""
    assert sorted(i for part in plan.values() for i in part) == list(range(rows.num_rows))
    assert sum(record["tokens"] for record in records.values()) == int(rows.lengths.sum())


def show(shard: Shard, verifier, near_ties: int, num_rows: int) -> None:
    """What an operator should look at: one row's states, and how the proof went."""
    row = shard.row(0)
    log("sample", row=row.row_id, text=verifier.tokenizer.decode(row.input_ids[-24:]))
    rms = row.aux_hidden_states.float().square().mean((0, 2)).sqrt()
    log("aux states", shape=tuple(row.aux_hidden_states.shape), rms=[f"{v:.3g}" for v in rms])
    log("last state", rms=float(row.last_hidden_states.float().square().mean().sqrt()))
    log("the verifier's next token equals the head's argmax", rows=num_rows, near_ties=near_ties)


if __name__ == "__main__":
    run_script(main, __doc__)
