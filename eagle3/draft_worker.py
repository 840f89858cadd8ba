"""The patch on vLLM's worker that records what its drafter drafts.

A ``worker_extension_cls`` like ``worker.CaptureWorker``, for engines with a drafter. The hook is
the model runner's ``propose_draft_token_ids`` (vLLM 0.32.0, ``v1/worker/gpu_model_runner.py``):
called once a step, with the tokens the step emitted and the number of drafts it verified, it
returns the drafts ``[num_requests, K]``. The drafter's own logits are what its
``logits_processor`` returns (``llama_eagle3.py``), once a position of the chain, over draft ids.

Nothing is read back from the device before ``drafts_publish``: recording costs a copy of a few
numbers a request and the best five of each row of logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import worker  # noqa: F401  (whose import has vLLM's processes die with their parent)
from .drafts import NUM_TOP, RecordedDrafts


class DraftWorker:
    """Methods added to vLLM's worker. TP rank 0 records; the other ranks draft the same."""

    def drafts_begin(self) -> None:
        """Forget what was recorded, and record from here on."""
        if self.rank == 0:
            if not hasattr(self, "_recorder"):
                self._recorder = _Recorder(self.model_runner)
            self._recorder.steps = []

    def drafts_publish(self, path: str) -> None:
        """Write what was recorded and stop recording."""
        if self.rank == 0:
            self._recorder.publish(Path(path))


class _Recorder:
    """Wraps the runner's ``propose_draft_token_ids`` and hooks the drafter's logits."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: list[dict[str, torch.Tensor]] | None = None
        self.top: list[Any] = []
        self._propose, runner.propose_draft_token_ids = runner.propose_draft_token_ids, self.propose
        runner.drafter.model.logits_processor.register_forward_hook(self.see_logits)

    def see_logits(self, _module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        if self.steps is not None:
            self.top.append(logits.topk(NUM_TOP))

    def propose(
        self,
        scheduler_output: Any,
        sampled_token_ids: torch.Tensor,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        *args: Any,
    ) -> torch.Tensor:
        """The runner's own method, then a copy of what went in and what came out."""
        self.top = []
        drafts = self._propose(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            *args,
        )
        if self.steps is not None:
            verified = spec_decode_metadata and spec_decode_metadata.num_draft_tokens
            self._record(scheduler_output, sampled_token_ids, verified, drafts)
        return drafts

    def _record(
        self,
        scheduler_output: Any,
        sampled: torch.Tensor,
        num_verified: list[int] | None,
        drafts: torch.Tensor,
    ) -> None:
        assert self.steps is not None
        runner, device = self.runner, drafts.device
        request_ids = runner.input_batch.req_ids
        num_requests = len(request_ids)
        scheduled = scheduler_output.num_scheduled_tokens
        ends = torch.tensor([scheduled[i] for i in request_ids]).cumsum(0).to(device)
        verified = torch.tensor(num_verified or [0] * num_requests).to(device)
        # Of the drafts verified, those not emitted were rejected: their places are behind t.
        rejected = (verified + 1 - (sampled >= 0).sum(1)).where(verified > 0, 0)
        emitted = torch.full((num_requests, drafts.shape[1] + 1), -1, device=device)
        emitted[:, : sampled.shape[1]] = sampled
        self.steps.append(
            {
                # Inside the worker request ids end in -<8 characters>.
                "request": torch.tensor([int(i.split("-")[0]) for i in request_ids]),
                "position": runner.positions[ends - 1 - rejected].clone(),
                "drafts": drafts.clone(),
                "num_verified": verified,
                "emitted": emitted,
                "top_ids": torch.stack([top.indices for top in self.top], dim=1),
                "top_logits": torch.stack([top.values.float() for top in self.top], dim=1),
                # A prompt prefilled in part: drafted from, and thrown away.
                "discarded": runner.discard_request_mask.gpu[:num_requests].clone(),
            }
        )

    def publish(self, path: Path) -> None:
        assert self.steps is not None
        columns = {
            name: torch.cat([step[name].cpu() for step in self.steps]) for name in self.steps[0]
        }
        offsets = self.runner.drafter.model.draft_id_to_target_id
        if offsets is not None:
            columns["top_ids"] += offsets.cpu()[columns["top_ids"]]
        kept = ~columns.pop("discarded").bool()
        integers = {n: c[kept].long() for n, c in columns.items() if n != "top_logits"}
        RecordedDrafts(**integers, top_logits=columns["top_logits"][kept]).save(path)
        self.steps = None
