"""The report page opens from disk, says its verdict first, and asks nothing of the network."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from eagle3.page import Page, Table

BROWSER = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
WIDTH, HEIGHT = 1000, 1400
FLAGS = [
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=5000",
    f"--window-size={WIDTH},{HEIGHT}",
]


@pytest.fixture
def page(tmp_path) -> Page:
    picture = tmp_path / "speed.png"
    from matplotlib import pyplot

    pyplot.imsave(picture, [[[0.0, 0.0, 1.0]] * 400] * 300)  # blue
    return Page(
        title="drafter <b> & co",
        verdict="FAIL",
        is_good=False,
        lines=["served 1.5"],
        pictures=[picture],
        tables=[
            Table("Gates", ["gate", "value"], [["<script>alert(1)</script>", "a|b\nc"]], "a note"),
            Table("Nothing", ["a"], []),
        ],
    )


class Outline(HTMLParser):
    """Tags in order, text, and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_verdict_then_pictures_then_tables_and_nothing_from_elsewhere(page, tmp_path):
    assert page.write(tmp_path, "report") == ["report.md", "report.html"]
    outline = Outline((tmp_path / "report.html").read_text())
    order = [tag for tag in outline.tags if tag in ("h1", "img", "table")]
    assert order == ["h1", "img", "table", "table"] and "script" not in outline.tags
    assert all(address.startswith("data:") for address in outline.addresses)
    for said in ("FAIL", "drafter <b> & co", "<script>alert(1)</script>", "a|b\nc", "a note"):
        assert said in outline.text
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0] == "# FAIL"
    assert lines.index("![speed](speed.png)") < lines.index("## Gates")
    assert "| <script>alert(1)</script> | a\\|b⏎c |" in lines


def browse(path: Path, tmp_path: Path, *flags: str) -> tuple[str, str]:
    """Open a page in a real browser; its output and what it complained of."""
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(complaints)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_looked_at_in_a_browser(page, tmp_path):
    page.write(tmp_path, "report")
    image = tmp_path / "screen.png"
    _, complaints = browse(tmp_path / "report.html", tmp_path, f"--screenshot={image}")
    assert complaints == ""
    pixels = matplotlib.image.imread(image)[..., :3]
    assert pixels.shape[1] == WIDTH

    def rows_of(red: float, green: float, blue: float) -> list[int]:
        near = abs(pixels - [red, green, blue]).max(-1) < 0.1
        return near.any(1).nonzero()[0].tolist()

    verdict, picture = rows_of(0.706, 0.137, 0.094), rows_of(0, 0, 1)
    assert verdict and picture and max(verdict) < min(picture)  # the verdict's red, then the blue
    assert max(verdict) < HEIGHT / 4 and len(picture) >= 290  # on top, and shown whole


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_the_browser_would_have_complained(tmp_path):
    """The test above can fail: a page with a broken script and a missing picture is told."""
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('oh'); nothing.at.all</script><img src=none.png>")
    _, complaints = browse(broken, tmp_path, "--dump-dom")
    assert "oh" in complaints and "nothing is not defined" in complaints
