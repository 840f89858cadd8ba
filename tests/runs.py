"""Runs of the tiny verifier whose stages write one small file instead of working."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle3.artifact import Artifact, open_artifact
from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.errors import StaleInputError
from eagle3.files import write_text
from eagle3.fingerprint import STAGES
from eagle3.script import Invocation
from eagle3.stage import Stage

ROOT = Path(__file__).resolve().parent.parent


class Run:
    """A run of the tiny verifier whose stages write one small file instead of working."""

    def __init__(self, write_config, overrides: tuple[str, ...] = ()) -> None:
        self.path = write_config()
        self.overrides = overrides

    @property
    def config(self) -> Config:
        return load_config(self.path, self.overrides)

    def invocation(self, **flags: Any) -> Invocation:
        flags = {"check": False, "redo": False, **flags}
        return Invocation("01_prepare_data.py", self.path, self.overrides, **flags)

    def stage(self, name: str = "01_data", **flags: Any) -> Stage:
        return Stage(self.config, name, self.invocation(**flags))

    def make(self, name: str = "01_data", text: str = "rows", **flags: bool) -> Artifact:
        with self.stage(name, **flags) as stage:
            assert not stage.done
            write_text(stage.directory / "rows.txt", text)
            counts = {"in": 3, "out": 1, "dropped": {"too long": 2}}
            return stage.commit(files=["rows.txt"], counts=counts)

    def make_all(self) -> None:
        for name in STAGES:
            self.make(name)

    def open(self, name: str = "01_data") -> Artifact:
        return open_artifact(self.config, name, self.invocation())

    def refused(self, name: str = "01_data", **flags: bool) -> StaleInputError:
        with pytest.raises(StaleInputError) as caught, self.stage(name, **flags):
            pass
        return caught.value

    def files(self) -> dict[str, bytes]:
        """Everything under the run, locks and logs aside."""
        directory = self.config.run_dir
        return {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != "log.txt" and not path.name.startswith(".")
        }


def start_script(
    tmp_path: Path, body: str, config: Path, *flags: str, **popen: Any
) -> subprocess.Popen:
    """Start a script whose ``main(invocation)`` is ``body``."""
    path = tmp_path / "01_prepare_data.py"
    imports = (
        "import os, sys, time\n"
        "from eagle3.errors import *\n"
        "from eagle3.script import log, run_script, stop_flag\n"
    )
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{imports}def main(invocation):\n{lines}run_script(main, 'A script.')\n")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, str(path), str(config), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{**streams, **popen},
    )


def load_script(name: str) -> ModuleType:
    """One of the six, as a module: ``load_script("05_export.py").main(invocation)``."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
