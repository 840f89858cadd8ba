"""The table of docs/verification.md, from the lists the tests run on.

python -m tests.verification_table      writes it anew
"""

from __future__ import annotations

from pathlib import Path

from tests.sabotages import EXPORT, UPSTREAM
from tests.served_sabotages import ALIKE, CAPTURE, GUESTS, READ_OTHERWISE
from tests.training_sabotages import TRAINING

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verification.md"
HEAD = "| sabotage | caught by | the error names |\n|---|---|---|\n"
Row = tuple[str, str, str]


def rows() -> dict[str, list[Row]]:
    """By heading of the page: sabotage, who catches it, what the error names."""
    return {
        "The exported directory": [
            (each.name, f"05{'; 06 --drafter' if each.alone else ''}", f"`{each.names}`")
            for each in EXPORT
        ],
        "What 05 reads, changed since": [
            (each.name, "05, before it starts", f"`{each.names}`") for each in UPSTREAM
        ],
        "Training that does otherwise": [
            (each.name, "05, by replay", f"{each.names}{_step(each.step)}") for each in TRAINING
        ],
        "Capture": [
            (
                each.name,
                f"{each.script[:2]}{', served' if each.script[:2] == '06' else ''}",
                _draft(0) if each.script[:2] == "06" else f"the row, `{each.names}`",
            )
            for each in CAPTURE
        ],
        "vLLM reads the files otherwise": [
            (
                each.name,
                "06, served",
                f"prompt, token, `{each.names}`"
                if each.position is None
                else _draft(each.position),
            )
            for each in READ_OTHERWISE
        ],
        "Somebody else's drafter, its files in order": [
            (
                each.name,
                "06 --drafter, served",
                "too little accepted, drafts as the replay's: trained on something else"
                if each.names == ALIKE
                else f"`{each.names}`",
            )
            for each in GUESTS
        ],
    }


def _step(step: int | None) -> str:
    place = "the TTT step" if step is None else f"TTT step {step}"
    return f": row, position, {place}"


def _draft(position: int) -> str:
    return f"prompt, token, both drafts; they part from draft position {position} on"


def tables() -> str:
    """All of them, in the page's order."""
    parts = []
    for heading, found in rows().items():
        lines = "".join(f"| {' | '.join(row)} |\n" for row in found)
        parts.append(f"### {heading}\n\n{HEAD}{lines}")
    return "\n".join(parts)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("### ")
    PAGE.write_text(text[:begin] + tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
