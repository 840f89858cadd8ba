"""``--check``: what a stage needs of this machine and this verifier, before anything is started.

Touches no GPU and downloads no weights: it reads the config, the verifier's metadata (config,
tokenizer, weight index), the driver's own listing of the GPUs, and the upstream manifests that are
there. Everything found is printed; the first thing that would stop the stage is the error.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import torch

from .artifact import open_artifact
from .chat import Chat
from .config import Config, HubSource, Source
from .contract import Wiring
from .corpus import read_source
from .disk import require_room
from .drafter import BORROWED, num_parameters, speculators_config, tensor_table
from .errors import ConfigError
from .files import format_bytes
from .fingerprint import STAGES
from .flat import written_layer_ids
from .gpus import require_gpus
from .manifest import MANIFEST
from .messages import Conversation, Drop
from .retention import Rounds
from .rows import TokenRows
from .script import Invocation, log
from .selection import check_config, select
from .shard_plan import bytes_of_rows, plain_bytes, plan_shards
from .verifier import Verifier
from .vocab import forced_ids

_ENGINE_STAGES = ("01_data", "02_hidden", "06_verify")
_DRAFTER_STAGES = ("04_train", "05_export", "06_verify")
_SAMPLE_CONVERSATIONS = 32  # of each source
_TWO_TURNS = Conversation(
    (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning": "a greeting"},
        {"role": "user", "content": "and you?"},
        {"role": "assistant", "content": "well", "reasoning": "a question"},
    )
)


def check(config: Config, stage: str, invocation: Invocation) -> None:
    """Run the preflight of one stage.

    Raises:
        ConfigError: the config and the verifier do not fit.
        NoRoomError: GPUs, GPU memory or disk are not enough.
        StaleInputError: an upstream artifact is there and is not what the config asks for.
    """
    log.stage = f"{stage} check"
    # Imports make many objects and no garbage: looking for it is a fifth of the time.
    gc.disable()
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
    chats = _check_templates(config, verifier)
    log("forced tokens are single tokens", ids=forced_ids(verifier, config.vocab.forced_tokens))
    if stage == "01_data":
        _check_sources(config, chats)
    rows = _upstream(config, stage, verifier, invocation)
    needs_drafter = stage in _DRAFTER_STAGES
    drafter_bytes = _check_table(config, wiring, verifier, stage) if needs_drafter else 0
    if stage == "02_hidden":
        _check_disk(config, wiring, rows)
    _estimate_time(config, stage, rows)
    if stage in _ENGINE_STAGES:
        require_gpus(config, verifier, drafter_bytes)
    log("nothing stands in the way", next=invocation.command())


def _check_templates(config: Config, verifier: Verifier) -> list[Chat]:
    """The template of every mode opens, its turns end where generation stops, and whether a second
    prompt begins with the first turn as it was emitted. Where it does not 01 makes a row a turn."""
    data = config.data
    other_modes = data.regenerate.other_modes if data.regenerate else ()
    chats = []
    for arguments in (data.chat_template_kwargs, *(m.chat_template_kwargs for m in other_modes)):
        chat = Chat.open(verifier, arguments)
        try:
            is_kept = len(chat.training_rows(_TWO_TURNS)) == 1
            history = "kept: turns share a row" if is_kept else "rewritten: a row a turn"
        except Drop as drop:
            history = f"conversations of several turns are dropped: {drop}"
        log("template opens and its turns end", arguments=arguments, history=history)
        chats.append(chat)
    return chats


def _check_sources(config: Config, chats: list[Chat]) -> None:
    """The beginning of every source can be read, and goes through the template."""
    for source in config.data.sources:
        sample = _sample(source)
        usable, dropped = select([sample], chats[0], config.data, frozenset(), chats[1:])
        log("source", name=source.name, sample=len(sample), usable=len(usable), **dropped)
    for source in config.evaluation.prompt_sets:
        log("evaluation", name=source.name, sample=len(_sample(source)))


def _sample(source: Source) -> list[Conversation]:
    """A source's first conversations; none of a hub dataset, as opening it would download it."""
    if isinstance(source, HubSource):
        log("not opened: that downloads it", name=source.name, path=source.path)
        return []
    most = min(source.max_conversations or _SAMPLE_CONVERSATIONS, _SAMPLE_CONVERSATIONS)
    return read_source(source.model_copy(update={"max_conversations": most}))


def _upstream(
    config: Config, stage: str, verifier: Verifier, invocation: Invocation
) -> TokenRows | None:
    """Open the upstream artifacts that are there; 01's rows, if it is one of them."""
    rows = None
    has_weights = any(verifier.directory.glob("*.safetensors"))
    for name in STAGES[stage].inputs:
        if not (config.run_dir / name / MANIFEST).is_file():
            log("input not there yet", stage=name, command=invocation.command(STAGES[name].script))
            continue
        if not has_weights:  # they are part of what an artifact was made from
            log("input not compared: the verifier's weights are not here", stage=name)
            continue
        artifact = open_artifact(config, name, invocation)
        log("input", path=artifact.directory, digest=artifact.digest[:12])
        if name == "01_data":
            rows = TokenRows.load(artifact.path("rows.safetensors"))
    return rows


def show_table(table: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Every exported tensor: name, shape, dtype, size."""
    for name, (shape, dtype) in table.items():
        size = format_bytes(math.prod(shape) * dtype.itemsize)
        log(f"{name:42}", shape=list(shape), dtype=str(dtype).removeprefix("torch."), size=size)
    log("total", parameters=f"{num_parameters(table):,}", size=format_bytes(_num_bytes(table)))


def _num_bytes(table: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in table.values())


def _say_sglang(config: Config, wiring: Wiring, verifier: Verifier) -> None:
    """Whether 05 will have a directory for SGLang: too late to change once states are captured."""
    try:
        written_ids = written_layer_ids(config.drafter, wiring, verifier.text_config)
    except ConfigError as error:
        log("there will be no directory for SGLang; vLLM's is not concerned", why=str(error))
    else:
        log("SGLang", writes_aux_layer_ids=written_ids)


def _check_table(config: Config, wiring: Wiring, verifier: Verifier, stage: str) -> int:
    """Show the table computed from the config; for 04 it is what speculators' model has.

    The model is built on the meta device: every shape, not a byte of memory. Its import is a third
    of such a check, and 05 and 06 only load what 04 trained.

    Returns:
        Bytes of the drafter's weights.
    """
    draft_vocab_size = config.vocab.draft_vocab_size
    table = tensor_table(
        config.drafter,
        num_aux=len(wiring.aux_layer_ids),
        draft_vocab_size=draft_vocab_size,
        vocab_size=verifier.vocab_size,
    )
    show_table(table)
    if stage == "04_train":
        _require_speculators_shapes(config, wiring, verifier, table)
    return _num_bytes(table)


def _require_speculators_shapes(
    config: Config, wiring: Wiring, verifier: Verifier, table: dict[str, Any]
) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.device("meta"):
        model = Eagle3DraftModel(
            speculators_config(
                wiring,
                config.drafter,
                draft_vocab_size=config.vocab.draft_vocab_size,
                verifier=verifier,
                num_speculative_tokens=config.verify.num_speculative_tokens,
            )
        )
    theirs = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in BORROWED}
    assert theirs == {name: shape for name, (shape, _) in table.items()}
    rope_width = 2 * len(model.rotary_emb.inv_freq)
    assert rope_width == config.drafter.head_dim, "RoPE is not built from head_dim"
    log("speculators' model on the meta device has these shapes", rope_width=rope_width)


def _check_disk(config: Config, wiring: Wiring, rows: TokenRows | None) -> None:
    """Hidden-state bytes against the disk: of 01's rows, or of the most the sources can give."""
    round_tokens = config.capture.round_tokens
    if rows is not None:
        plan = plan_shards(rows, config, wiring)
        if round_tokens:
            rounds = Rounds.now(plan, config)
            log("rounds", **rounds.to_json())
            plan = [shard for shard in plan if rounds.holds(shard)]
        num_tokens = sum(shard.num_tokens for shard in plan)
        needed_bytes = sum(shard.num_bytes for shard in plan)
    else:
        num_tokens = _most_tokens(config)
        if num_tokens and round_tokens:  # and the validation rows, of which nothing is known yet
            num_tokens = min(num_tokens, round_tokens)
        length = config.data.max_length_tokens  # rows of that length, supervised throughout
        row_bytes = bytes_of_rows(length, length, wiring, config.capture.state_dtype)
        needed_bytes = (num_tokens or length) // length * row_bytes
    log(
        "hidden states",
        bytes_per_token=round(needed_bytes / (num_tokens or config.data.max_length_tokens)),
        plain=plain_bytes(config),
        tokens=num_tokens or "unknown before 01",
    )
    if num_tokens:
        require_room(
            config.run_dir / "02_hidden",
            needed_bytes=needed_bytes,
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


def _estimate_time(config: Config, stage: str, rows: TokenRows | None) -> None:
    """Hours at the rates the config assumes; measured rates stand in each stage's log."""
    num_tokens = _most_tokens(config) if rows is None else len(rows.input_ids)
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
