"""Reading the run's YAML: overrides applied, mistakes explained by the key the user typed."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .config import Config, Section
from .errors import ConfigError

# What pydantic adds to an error's location to say which member of a union it tried.
_UNION_BRANCHES = ("local", "hub", "package", "literal[False]", "RegenerateSection")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but a key given twice is an error: the last one would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                what = f"the key {key_node.value!r} stands here a second time"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML config and apply ``--set section.key=value`` overrides (values are YAML).

    Raises:
        ConfigError: no such file, not YAML, a key given twice, an unknown key (the nearest valid
            one is named), a missing key, or a value that does not fit.
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
        tree = yaml.load(path.read_bytes(), _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the config is not valid YAML",
            where=path,
            expected="YAML",
            found=_one_line(error),
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
        node[leaf] = yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the value of --set is not valid YAML",
            where=f"--set {override}",
            expected="a YAML value",
            found=_one_line(error),
            fix="correct the --set",
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
