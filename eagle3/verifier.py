"""The verifier's files: its identity, geometry, tokenizer and the three tensors a drafter borrows.

Reads the checkpoint directly, so it works the same on a single file, on a sharded checkpoint and
on a multimodal one whose text model carries a prefix (``language_model.model.`` in Kimi K2.5,
``model.language_model.`` in what transformers itself saves). Heavy libraries are imported where
they are used: asking who a verifier is must be quick.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import VerifierSection
from .errors import ConfigError
from .family import required_keys
from .files import sampled_sha256, sha256_file, sha256_json
from .remote_code import refuse_code

if TYPE_CHECKING:
    import torch

_METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.py", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json")


@dataclass(frozen=True)
class Verifier:
    """A verifier checkpoint on disk.

    Attributes:
        directory: where its files are.
        config: its ``config.json`` (the text part of a multimodal one is ``text_config``).
        trust_remote_code: whether code shipped in the directory may run.
    """

    directory: Path
    config: dict[str, Any]
    trust_remote_code: bool

    @classmethod
    def open(cls, section: VerifierSection, *, weights: bool = True) -> Verifier:
        """Find the verifier: a local directory, or a hub name resolved to its snapshot.

        Args:
            weights: False takes its metadata alone (config, tokenizer, weight index).

        Raises:
            ConfigError: it does not exist, is no safetensors checkpoint, has a damaged config,
                lacks a key vLLM reads, or needs code that the config does not trust.
        """
        directory = Path(section.path)
        if not directory.is_dir():
            directory = _download(section, weights)
        if not (directory / "config.json").is_file():
            found = "no such file"
            raise _bad(directory / "config.json", "a Hugging Face model directory", found)
        config = _read_json(directory / "config.json")
        if weights and not any(directory.glob("*.safetensors")):
            raise _bad(directory, "safetensors weights", "none")
        for key, reader in required_keys(config).items():
            if key not in config:
                expected = f"{key}, which vLLM reads ({reader})"
                raise _bad(directory / "config.json", expected, "no such key")
        if not section.trust_remote_code:
            path = directory / "tokenizer_config.json"
            refuse_code(directory, config, _read_json(path) if path.is_file() else {})
        return cls(directory, config, section.trust_remote_code)

    @property
    def text_config(self) -> dict[str, Any]:
        """The decoder's config: ``text_config`` of a multimodal verifier, else the config."""
        return self.config.get("text_config", self.config)

    @property
    def hidden_size(self) -> int:
        return self.text_config["hidden_size"]

    @property
    def num_layers(self) -> int:
        return self.text_config["num_hidden_layers"]

    @property
    def vocab_size(self) -> int:
        return self.text_config["vocab_size"]

    @property
    def rms_norm_eps(self) -> float:
        return self.text_config["rms_norm_eps"]

    @property
    def weights_bytes(self) -> int | None:
        """Size of the weights, from their index or the files; None if neither is here."""
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            return _read_json(index)["metadata"]["total_size"]
        return sum(path.stat().st_size for path in self.directory.glob("*.safetensors")) or None

    @cached_property
    def tokenizer(self):
        """The verifier's tokenizer.

        Raises:
            ConfigError: it has no chat template.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            self.directory, trust_remote_code=self.trust_remote_code
        )
        if not tokenizer.chat_template:
            raise ConfigError(
                "the verifier's tokenizer has no chat template",
                where=self.directory / "tokenizer_config.json",
                expected="a chat template: training text must be what the served model sees",
                found="none",
                fix="take the chat-tuned checkpoint, or add chat_template.jinja beside it",
            )
        return tokenizer

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Token ids generation stops on (generation_config, then config, then tokenizer)."""
        return self._declared_end_of_turn or (self.tokenizer.eos_token_id,)

    @cached_property
    def _declared_end_of_turn(self) -> tuple[int, ...]:
        """What generation_config or config says, without loading the tokenizer; () if neither."""
        generation = self.directory / "generation_config.json"
        found = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        if found is None:
            found = self.text_config.get("eos_token_id")
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (found,)

    @cached_property
    def identity(self) -> dict[str, str]:
        """What makes this verifier itself; any change makes every stage stale.

        Read off its files alone, in a moment: weights of hundreds of gigabytes are sampled, not
        read whole (``sampled_sha256``), and no tokenizer is loaded (where a part is declared
        nowhere else, the tokenizer's own files decide it, and they count).
        """
        weights = {
            path.name: sampled_sha256(path) for path in sorted(self.directory.glob("*.safetensors"))
        }
        # Trusted code decides what the tokens are.
        code = [path.name for path in self.directory.glob("*.py")] if self.trust_remote_code else []
        tokenizer = {
            name: sha256_file(self.directory / name)
            for name in (*_TOKENIZER_FILES, *code)
            if (self.directory / name).is_file()
        }
        return {
            "config": sha256_json(self.config),
            "weights": sha256_json(weights),
            "tokenizer": sha256_json(tokenizer),
            "chat_template": sha256_json(self._declared_template),
            "end_of_turn": sha256_json(list(self._declared_end_of_turn)),
        }

    @property
    def _declared_template(self) -> Any:
        """The chat template where transformers looks for it: its own file (and those of further
        named templates), or else the tokenizer's config."""
        file = self.directory / "chat_template.jinja"
        if not file.is_file():
            config = self.directory / "tokenizer_config.json"
            return _read_json(config).get("chat_template") if config.is_file() else None
        template = file.read_text(encoding="utf-8")
        others = sorted((self.directory / "additional_chat_templates").glob("*.jinja"))
        named = {path.stem: path.read_text(encoding="utf-8") for path in others}
        return {"default": template, **named} if named else template

    def embed_tokens(self) -> torch.Tensor:
        """Input embedding, ``[vocab_size, hidden_size]``, in the checkpoint's dtype."""
        return self._tensor("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))

    def lm_head(self) -> torch.Tensor:
        """Output head, ``[vocab_size, hidden_size]``; the embedding where the two are tied."""
        tied = self.text_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings"))
        if tied is None:  # the default of its model class, left out of config.json: weights tell
            tied = not any(name.endswith("lm_head.weight") for name in self._weight_files)
        if tied:
            return self.embed_tokens()
        return self._tensor("lm_head.weight", (self.vocab_size, self.hidden_size))

    def final_norm(self) -> torch.Tensor:
        """Weight of the RMSNorm before the head, ``[hidden_size]``."""
        return self._tensor("model.norm.weight", (self.hidden_size,))

    @cached_property
    def _weight_files(self) -> dict[str, Path]:
        """Tensor name -> file holding it, from the files' own headers."""
        from safetensors import safe_open

        index: dict[str, Path] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                index.update(dict.fromkeys(file.keys(), path))
        return index

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        from safetensors import safe_open

        nested = name.replace("model.", "model.language_model.", 1)
        for full_name in (name, f"language_model.{name}", nested):
            if full_name in self._weight_files:
                path = self._weight_files[full_name]
                with safe_open(path, framework="pt") as file:
                    tensor = file.get_tensor(full_name)
                if tuple(tensor.shape) != shape:
                    raise _bad(f"{path}: {full_name}", shape, tuple(tensor.shape))
                return tensor
        raise _bad(f"{self.directory}: {name}", "this tensor in the checkpoint", "no such tensor")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _bad(path, "valid JSON", error) from error


def _bad(where: Any, expected: Any, found: Any) -> ConfigError:
    return ConfigError(
        "the verifier is not usable",
        where=where,
        expected=expected,
        found=found,
        fix="correct verifier.path",
    )


def _download(section: VerifierSection, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = None if weights else _METADATA_FILES
        return Path(
            snapshot_download(section.path, revision=section.revision, allow_patterns=patterns)
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _bad(
            f"verifier.path = {section.path}",
            "an existing directory or a reachable hub model",
            f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
        ) from error
