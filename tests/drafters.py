"""Random drafters of any geometry on the tiny verifier, built and exported as 04 and 05 do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.config import DrafterSection, VerifierSection
from eagle3.contract import ALIGNMENT, LAST_STATE, LAYER_CONVENTION, Wiring
from eagle3.drafter import BORROWED, build, speculators_config, tensor_table
from eagle3.export import Form, serving_tensors, speculators_form, write_directory
from eagle3.flat import flat_form
from eagle3.verifier import Verifier
from eagle3.vocab import VocabMap

GEOMETRY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # attention is 96 wide, the hidden size 64
    "intermediate_size": 96,
    "rms_norm_eps": 1.0e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 1024,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "reference": None,
}


def section(**changes: Any) -> DrafterSection:
    return DrafterSection(**{**GEOMETRY, **changes})


def open_verifier(directory: Path, dtype: str = "float32") -> Verifier:
    return Verifier.open(
        VerifierSection(path=str(directory), revision=None, trust_remote_code=False, dtype=dtype)
    )


@dataclass
class Drafter:
    """A drafter and everything it is checked against."""

    section: DrafterSection
    verifier: Verifier
    vocab_map: VocabMap
    wiring: Wiring
    model: Any  # speculators' Eagle3DraftModel, float32

    @classmethod
    def random(
        cls,
        verifier: Verifier,
        *,
        draft_vocab_size: int = 128,
        target_ids: list[int] | None = None,
        aux_layer_ids: tuple[int, ...] = (1, 2, 3),
        seed: int = 0,
        **changes: Any,
    ) -> Drafter:
        geometry = section(**changes)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = target_ids or torch.randperm(verifier.vocab_size)[:draft_vocab_size].tolist()
            vocab_map = VocabMap.from_target_ids(ids, verifier.vocab_size)
            wiring = Wiring(
                aux_layer_ids=aux_layer_ids,
                num_verifier_layers=verifier.num_layers,
                layer_convention=LAYER_CONVENTION,
                last_state=LAST_STATE,
                hidden_size=verifier.hidden_size,
                dtype="float32",
                alignment=ALIGNMENT,
            ).bind(vocab_map=vocab_map.digest, drafter=geometry)
            config = speculators_config(
                wiring,
                geometry,
                draft_vocab_size=len(ids),
                verifier=verifier,
                num_speculative_tokens=3,
            )
            model = build(config, verifier, vocab_map)
            for name, parameter in model.named_parameters():
                if name in BORROWED:
                    continue
                if "norm" in name:  # away from 1: a norm that is skipped or swapped must show
                    torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
                elif name != "lm_head.weight":
                    torch.nn.init.normal_(parameter.data, std=0.3)
        return cls(geometry, verifier, vocab_map, wiring, model.eval())

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "draft_vocab_size": len(self.vocab_map.d2t),
            "vocab_size": self.verifier.vocab_size,
            "num_speculative_tokens": 3,
        }

    @property
    def table(self) -> dict[str, Any]:
        sizes = {k: v for k, v in self.sizes.items() if k != "num_speculative_tokens"}
        return tensor_table(self.section, num_aux=len(self.wiring.aux_layer_ids), **sizes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What 04 publishes."""
        state = self.model.state_dict().items()
        return {name: tensor.contiguous() for name, tensor in state if name not in BORROWED}

    @property
    def form(self) -> Form:
        return speculators_form(self.section, self.wiring, **self.sizes)

    @property
    def flat(self) -> Form:
        return flat_form(self.section, self.wiring, self.verifier.text_config, **self.sizes)

    def export(self, directory: Path, form: Form | None = None) -> Path:
        """Write it as 05 does, in speculators' form unless told otherwise."""
        directory.mkdir()
        checkpoint = directory.with_suffix(".best")
        save_file(self.state_dict(), checkpoint)
        tensors = serving_tensors(checkpoint, self.table)
        write_directory(directory, tensors, form or self.form, self.wiring, self.verifier)
        return directory


def rounded(model: Any) -> Any:
    """The model with the values its export holds, in float32."""
    for name, parameter in model.named_parameters():
        if name not in BORROWED:
            parameter.data = parameter.data.bfloat16().float()
    return model
