"""A report page in two forms: Markdown beside its pictures, and one HTML file that holds them.

The HTML opens from disk: no script, no font, no picture from anywhere else.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from .files import write_text


@dataclass(frozen=True)
class Table:
    """A titled table; ``note`` stands between title and table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """Verdict first, then the pictures, then the tables.

    Attributes:
        verdict: a few words, "PASS".
        is_good: colours it.
        lines: sentences under it.
        pictures: PNG files beside the page.
    """

    title: str
    verdict: str
    is_good: bool
    lines: Sequence[str]
    pictures: Sequence[Path]
    tables: Sequence[Table]

    def write(self, directory: Path, stem: str) -> list[str]:
        """Write ``<stem>.md`` and ``<stem>.html``; their names."""
        write_text(directory / f"{stem}.md", self.markdown())
        write_text(directory / f"{stem}.html", self.html())
        return [f"{stem}.md", f"{stem}.html"]

    def markdown(self) -> str:
        lines = [f"# {self.verdict}", "", self.title, ""]
        lines += [f"- {line}" for line in self.lines]
        lines += ["", *(f"![{path.stem}]({path.name})" for path in self.pictures)]
        for table in self.tables:
            lines += ["", f"## {table.title}", ""]
            lines += [table.note, ""] if table.note else []
            lines += markdown_table(table)
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        pictures = [
            (path.stem, base64.b64encode(path.read_bytes()).decode()) for path in self.pictures
        ]
        return _HTML.render(page=self, pictures=pictures)


def markdown_table(table: Table) -> list[str]:
    """Its lines, without title and note."""
    cells = [table.header, ["---"] * len(table.header), *table.rows]
    escaped = ([cell.replace("|", "\\|").replace("\n", "⏎") for cell in row] for row in cells)
    return ["| " + " | ".join(row) + " |" for row in escaped]


_HTML = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ page.verdict }}: {{ page.title }}</title>
<link rel="icon" href="data:,">
<style>
  body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; }
  h1 { display: inline-block; padding: .2rem .8rem; border-radius: .3rem; color: white; }
  h1.good { background: #1a7f37; }
  h1.bad { background: #b42318; }
  h2 { margin: 2rem 0 .4rem; font-size: 1.1rem; }
  img { max-width: 100%; display: block; margin: 1rem 0; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left; }
  td { white-space: pre-wrap; }
</style>
</head>
<body>
<h1 class="{{ 'good' if page.is_good else 'bad' }}">{{ page.verdict }}</h1>
<p>{{ page.title }}</p>
<ul>
{% for line in page.lines %}
  <li>{{ line }}</li>
{% endfor %}
</ul>
{% for name, data in pictures %}
<img alt="{{ name }}" src="data:image/png;base64,{{ data }}">
{% endfor %}
{% for table in page.tables %}
<h2>{{ table.title }}</h2>
{% if table.note %}
<p>{{ table.note }}</p>
{% endif %}
<table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
</body>
</html>
"""
)
