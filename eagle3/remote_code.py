"""Code shipped with a verifier (its ``auto_map``) runs only where the config says so.

Asked before any library is: transformers 5.19 can make a tokenizer of its own out of a
``tiktoken.model``, which need not be the verifier's, and libraries that are told nothing of trust
ask at the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ConfigError


def refuse_code(directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> None:
    """Refuse a verifier that needs code of its own, where ``verifier.trust_remote_code`` is false.

    Args:
        config: the verifier's ``config.json``.
        tokenizer_config: its ``tokenizer_config.json``, empty if it has none.

    Raises:
        ConfigError: its config class or its tokenizer is code.
    """
    needed = {"config class": _config_code(config), "tokenizer": _tokenizer_code(tokenizer_config)}
    for part, code in needed.items():
        if code:
            raise ConfigError(
                f"the verifier's {part} is code shipped with it, which may not run",
                where="verifier.trust_remote_code",
                expected=f"true, to run {code} from {directory}",
                found=False,
                fix="read that code, and set verifier.trust_remote_code: true if you trust it",
            )


def register_config_class(directory: Path, config: dict[str, Any]) -> None:
    """Make ``AutoConfig`` know the config class of a trusted verifier, if it is shipped code.

    For speculators 0.9.0, which opens the verifier without a word on trust
    (``models/eagle3/core.py``, ``load_verifier_weights`` and ``from_pretrained``).
    """
    if _config_code(config):
        from transformers import AutoConfig

        shipped = AutoConfig.from_pretrained(directory, trust_remote_code=True)
        AutoConfig.register(shipped.model_type, type(shipped))


def _config_code(config: dict[str, Any]) -> Any:
    """What ``auto_map`` names, if transformers has no class for the type (for Kimi it has)."""
    code = (config.get("auto_map") or {}).get("AutoConfig")
    if code is None:
        return None
    from transformers import CONFIG_MAPPING

    return None if config.get("model_type") in CONFIG_MAPPING else code


def _tokenizer_code(tokenizer_config: dict[str, Any]) -> Any:
    code = tokenizer_config.get("auto_map") or {}
    return code.get("AutoTokenizer") if isinstance(code, dict) else code  # an old form: a list
