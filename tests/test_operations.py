"""docs/operations.md names every error an operator can meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXIT_CODES = {
    "ConfigError": 2,
    "StaleInputError": 3,
    "OutdatedError": 3,
    "GateError": 4,
    "NoRoomError": 5,
}


def raised() -> Iterator[tuple[int, str]]:
    """Exit code and sentence of every error whose sentence stands in the code; "…" for values."""
    for path in [*sorted(ROOT.glob("eagle3/*.py")), *sorted(ROOT.glob("0*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in EXIT_CODES:
                if node.args and (text := _text(node.args[0])):
                    yield EXIT_CODES[node.func.id], text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts).strip("…: ")
    return ""


def documented() -> set[tuple[int, str]]:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.+?) \|", text, re.MULTILINE)
    return {(int(code), sentence) for code, sentence in rows}


def test_enough_errors_are_found():
    assert len(set(raised())) > 40


@pytest.mark.parametrize("code, sentence", sorted({e for e in raised() if len(e[1]) > 4}))
def test_error_is_in_the_operators_list(code, sentence):
    assert (code, sentence) in documented()
