"""One training step at a config's full size on tensors that have shapes and no storage.

The operations are those of ``TTTStep`` itself, in the order and the dtypes a GPU is given them.
That it runs at all shows that nothing in the step waits for a value: there are none.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from unittest import mock

import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig

from eagle3 import attention, losses
from eagle3.batches import Batch, Row, collate
from eagle3.config import Config
from eagle3.drafter import BORROWED, layer_config
from eagle3.ttt import TTTStep

# NVIDIA's data sheet: dense bfloat16, HBM3e.
H200_FLOPS, H200_BYTES_PER_S = 989e12, 4.8e12
VOCAB_SIZE = 163_840  # Kimi-K2.5's, for the embedding: no verifier is opened
ROW_TOKENS, SUPERVISED_SHARE = 2048, 2 / 3  # the demo's share


def empty_batch(config: Config) -> Batch:
    """As many rows of ``ROW_TOKENS`` as a batch of the config holds."""
    num_aux = len(config.capture.aux_layer_ids)
    states = torch.empty(
        (ROW_TOKENS, num_aux, config.drafter.hidden_size), dtype=torch.bfloat16, device="meta"
    )
    row = Row(
        input_ids=torch.zeros(ROW_TOKENS, dtype=torch.int64),
        loss_mask=torch.arange(ROW_TOKENS) >= round(ROW_TOKENS * (1 - SUPERVISED_SHARE)),
        aux_hidden_states=states,
        last_hidden_states=states[:, 0],
    )
    return collate([row] * (config.train.batch_tokens // ROW_TOKENS), config.train.ttt_steps)


class Counting(TorchDispatchMode):
    """What the operations under it sum to, each reading its inputs and writing its outputs once.

    Args:
        alive: tensors that stay throughout.

    Attributes:
        flops: of what torch has a formula for: all matrix products.
        moved_bytes, product_bytes: of all operations, and of the matrix products alone.
        peak_bytes: the most alive at a time.
        h200_s: on an H200 that runs one operation after the other, each at the arithmetic's peak
            rate or at the memory's, whichever takes longer.
    """

    def __init__(self, alive: list[torch.Tensor]) -> None:
        super().__init__()
        self.flops = self.moved_bytes = self.product_bytes = self.peak_bytes = 0
        self.h200_s = 0.0
        self._alive: set[int] = set()
        self._alive_bytes = 0
        for tensor in alive:
            self._note(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        for tensor in tensors:
            self._note(tensor.untyped_storage())
        if func.is_view or func.namespace == "prim" or "empty" in func.name():
            return result
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        moved_bytes = sum(tensor.nbytes for tensor in tensors)
        self.flops += flops
        self.moved_bytes += moved_bytes
        self.product_bytes += moved_bytes if formula else 0
        self.h200_s += max(flops / H200_FLOPS, moved_bytes / H200_BYTES_PER_S)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive.add(key)
            self._alive_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self._alive_bytes -= num_bytes


def count(config: Config, batch: Batch) -> tuple[Counting, int]:
    """Run the step forward and backward, AdamW's moments in memory.

    Returns:
        What was counted, and the number of trained weights.
    """
    drafter = config.drafter
    layer = LlamaConfig(**layer_config(drafter, VOCAB_SIZE) | {"dtype": "float32"})
    layer._attn_implementation = "eager"
    model_config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.vocab.draft_vocab_size,
        norm_before_residual=drafter.norm_before_residual,
        norm_before_fc=drafter.norm_before_fc,
        fc_norm=drafter.fc_norm,
        norm_output=drafter.norm_output,
        eagle_aux_hidden_state_layer_ids=list(config.capture.aux_layer_ids),
    )
    with (
        mock.patch.dict(losses._CHUNK_LOGITS, cpu=losses._CHUNK_LOGITS["cuda"]),
        mock.patch.dict(attention._BLOCK_SCORES, cpu=attention._BLOCK_SCORES["cuda"]),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        model = Eagle3DraftModel(model_config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in BORROWED)
        step = TTTStep(model, loss=config.train.loss, ttt_step_loss_decay=1.0)
        states = {
            name: torch.empty_like(getattr(batch, name), device="cpu")
            for name in ("aux_hidden_states", "last_hidden_states")
        }
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        moments = [torch.empty_like(parameter) for parameter in (*trained, *trained)]
        alive = [*step.parameters(), *step.buffers(), *moments, *states.values()]
        with Counting(alive) as counting:
            with torch.autocast("cpu", torch.bfloat16):
                loss = step(replace(batch, **states)).loss
            loss.backward()
    return counting, sum(parameter.numel() for parameter in trained)
