"""Turn a compressed-tensors INT4 checkpoint into a plain bfloat16 one.

Reads a directory whose experts are pack-quantized (Kimi-K2.5's release) and writes one with the
same files, every packed weight decompressed by the compressed-tensors library and the
quantisation config gone: what vLLM can run where it has no INT4 kernel (on CPU).

    .venv/bin/python tools/decompress_experts.py models/tiny-kimi-int4 models/tiny-kimi-plain

Disk: four times the experts' INT4 size (2 TB for Kimi-K2.5 itself). If it stops, remove what it
wrote and run the same command again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
PACKED = ("weight_packed", "weight_scale", "weight_shape")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkpoint with packed experts")
    parser.add_argument("destination", type=Path, help="a new directory")
    arguments = parser.parse_args()
    decompress_directory(arguments.source, arguments.destination)
    print(f"made: {arguments.destination}")


def decompress_directory(source: Path, destination: Path) -> None:
    """Write ``destination``; file by file, so that no more than one file is in memory.

    Raises:
        ValueError: the quantisation is not one group of pack-quantized weights.
        FileExistsError: ``destination`` is there.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    scheme = pop_scheme(config)
    destination.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, destination)
    write_json(destination / "config.json", config)
    weight_map, num_bytes = {}, 0
    for path in sorted(source.glob("*.safetensors")):
        tensors = decompressed(load_file(path), scheme)
        save_file(tensors, destination / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(sorted(tensors), path.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    write_json(destination / INDEX, index)


def pop_scheme(config: dict) -> QuantizationScheme:
    """Take the quantisation out of a config, wherever it stands, and return its one scheme."""
    holders = [part for part in (config, config.get("text_config", {})) if is_quantized(part)]
    if not holders:
        raise ValueError("config.json has no quantization_config")
    quantization = [part.pop("quantization_config") for part in holders][0]
    groups = list(quantization["config_groups"].values())
    if quantization["format"] != "pack-quantized" or len(groups) != 1:
        raise ValueError(f"{quantization['format']} in {len(groups)} groups is not known here")
    return QuantizationScheme(**groups[0])


def is_quantized(config: dict) -> bool:
    return "quantization_config" in config


def decompressed(
    tensors: dict[str, torch.Tensor], scheme: QuantizationScheme
) -> dict[str, torch.Tensor]:
    """One file's tensors; a packed weight and its companions stand in one file."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            packed = {key: tensors[f"{module}.{key}"] for key in PACKED}
            made = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
            plain[f"{module}.weight"] = made.contiguous()
        elif kind not in PACKED:
            plain[name] = tensor
    return plain


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
