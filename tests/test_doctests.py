"""The worked examples in the docstrings are true."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch

import eagle3

MODULES = [module.name for module in pkgutil.iter_modules(eagle3.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"eagle3.{name}")
    result = doctest.testmod(module, extraglobs={"np": np, "torch": torch, "Path": Path})
    assert result.failed == 0


def test_the_sequence_conventions_have_examples():
    """Where an off-by-one would be silent, there is an example to read."""
    for name in ("contract", "batches", "acceptance", "shard_plan", "predict"):
        module = importlib.import_module(f"eagle3.{name}")
        assert doctest.testmod(module, extraglobs={"np": np, "torch": torch}).attempted, name
