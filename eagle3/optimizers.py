"""What turns gradients into steps: AdamW, or Muon for the matrices and AdamW for the norms.

Muon steps along the orthogonalised momentum of a matrix (Jordan et al., kellerjordan.github.io/
posts/muon), its steps scaled to the size of AdamW's (Liu et al., arXiv 2502.16982), so that one
learning rate is meant for both. It keeps one moment where AdamW keeps two, and pays for each step
five products with the matrix and two with its Gram matrix, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from .config import TrainSection

_MUON_MOMENTUM = 0.9  # 0.95, its authors', looks back over 20 steps: many for a run of hundreds
_NORM_RATE = 4.0  # times the matrices': AdamW moves a norm's weights, all near 1, by the rate alone


def make_optimizers(
    section: TrainSection, parameters: Iterable[torch.nn.Parameter]
) -> list[Optimizer]:
    """The optimizers of ``train.optimizer`` over the parameters that ask for gradients.

    Returns:
        One of AdamW; or one Muon a matrix, the costliest first, and AdamW: to be stepped by
        ``step_all``.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    settings = {"lr": section.learning_rate, "weight_decay": section.weight_decay}
    adamw = partial(AdamW, betas=(0.9, 0.95), fused=True, **settings)
    if section.optimizer == "adamw":
        return [adamw(trainable)]
    muon = partial(Muon, momentum=_MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw", **settings)
    matrices = [parameter for parameter in trainable if parameter.ndim == 2]
    norms = [parameter for parameter in trainable if parameter.ndim == 1]
    assert len(matrices) + len(norms) == len(trainable)
    matrices.sort(key=lambda matrix: matrix.numel() * min(matrix.shape), reverse=True)
    return [*(muon([matrix]) for matrix in matrices), adamw(norms, lr=_NORM_RATE * section.learning_rate)]


def step_all(optimizers: Sequence[Any]) -> None:
    """One step of each optimizer; a CPU's cores take whole optimizers, one after another.

    Two cores that share each product of a small matrix take 1.6 times as long (docs/training.md).
    """
    num_cores = torch.get_num_threads()
    if num_cores == 1 or len(optimizers) == 1 or torch.cuda.is_available():
        for optimizer in optimizers:
            optimizer.step()
        return
    with ThreadPoolExecutor(num_cores, "optimizer", torch.set_num_threads, (1,)) as cores:
        for _ in cores.map(lambda optimizer: optimizer.step(), optimizers):
            pass
