"""The patch on vLLM's worker that captures hidden states.

``worker_extension_cls`` appends this class to the bases of vLLM's own worker; its methods are
called with ``collective_rpc``. The hook is the model runner's ``execute_model``: after a forward
pass it returns None and leaves ``execute_model_state``, whose ``aux_hidden_states`` are one
``[num_tokens, H]`` tensor a layer, rows in batch order (vLLM 0.32.0,
``v1/worker/gpu_model_runner.py``, model runner V1, on CPU and GPU alike).

Where each row of a step belongs is taken from the runner's own ``positions``, and which token it
is from the runner's own ``input_ids``: a slicing error cannot hide, because the tokens stored are
the tokens the engine ran. Chunked prefills arrive in any order and a preempted request starts
over; both simply write by position.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .errors import PipelineError
from .files import sha256_file
from .orphans import die_with_parent
from .shards import ShardBuffer

# vLLM imports this module in each of its worker processes, before it loads the model there. They
# watch a pipe to their parent, but only from when the model is loaded, and between two steps
# (``v1/executor/multiproc_executor.py``, ``monitor_death_pipe``): a large model would go on loading
# on GPUs that nobody uses. With one worker the engine runs inside the script, and this is no child.
if parent := multiprocessing.parent_process():
    die_with_parent(parent.pid)


class CaptureWorker:
    """Methods added to vLLM's worker. TP rank 0 captures; the other ranks hold the same states."""

    def capture_begin(
        self,
        layer_ids: list[int],
        row_ids: list[int],
        lengths_tokens: list[int],
        has_last_state: bytes,
        state_dtype: str,
    ) -> None:
        """Start a shard: request ``str(i)`` of the engine is row i of the shard.

        Args:
            layer_ids: aux layer ids and then the last one (number of layers), ascending.
            has_last_state: a byte a token, 1 where the last state is kept.
            state_dtype: how aux and last states are kept (``shard_layout.StateDtype``).
        """
        runner = self.model_runner
        if not hasattr(self, "_capture"):
            runner.model.set_aux_hidden_state_layers(tuple(layer_ids))
            runner.use_aux_hidden_state_outputs = True
            self._capture = _Capture(runner, num_layers=len(layer_ids))
        if self.rank == 0:
            kept = torch.frombuffer(bytearray(has_last_state), dtype=torch.bool)
            self._capture.begin(row_ids, lengths_tokens, kept, state_dtype)

    def capture_publish(self, path: str) -> None:
        """End the shard and write it in the background, while the next one is computed."""
        if self.rank == 0:
            self._capture.publish(Path(path))

    def capture_wait(self) -> dict[str, Any] | PipelineError | None:
        """Wait for the oldest shard being written: its size in bytes and SHA-256, or the error
        that stopped it (vLLM passes raised ones on as text)."""
        return self._capture.wait() if self.rank == 0 else None


class _Capture:
    """The buffer being filled, and the thread that writes the one before it."""

    def __init__(self, runner: Any, num_layers: int) -> None:
        self.runner, self.num_layers = runner, num_layers
        self.buffer: ShardBuffer | None = None
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer")
        self.writing: list[Future] = []
        self._execute_model = runner.execute_model
        runner.execute_model = self.execute_model

    def begin(
        self,
        row_ids: list[int],
        lengths_tokens: list[int],
        has_last_state: torch.Tensor,
        state_dtype: str,
    ) -> None:
        config = self.runner.model_config
        self.buffer = ShardBuffer.allocate(
            row_ids,
            lengths_tokens,
            num_aux=self.num_layers - 1,
            hidden_size=config.get_hidden_size(),
            dtype=config.dtype,
            has_last_state=has_last_state,
            state_dtype=state_dtype,
        )

    def publish(self, path: Path) -> None:
        assert self.buffer is not None
        self.writing.append(self.writer.submit(_write, self.buffer, path))
        self.buffer = None

    def wait(self) -> dict[str, Any] | PipelineError:
        try:
            return self.writing.pop(0).result()
        except PipelineError as error:
            return error

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own ``execute_model``, then a copy of what it computed."""
        result = self._execute_model(scheduler_output, *args, **kwargs)
        state = self.runner.execute_model_state
        if self.buffer is not None and result is None and state is not None:
            self._copy(scheduler_output, state.aux_hidden_states)
        return result

    def _copy(self, scheduler_output: Any, states: list[torch.Tensor]) -> None:
        assert self.buffer is not None
        if len(states) != self.num_layers:
            raise RuntimeError(f"asked for {self.num_layers} layers' states, got {len(states)}")
        num_tokens = scheduler_output.total_num_scheduled_tokens
        positions = self.runner.positions[:num_tokens].to("cpu")
        places = torch.empty(num_tokens, dtype=torch.int64)
        begin = 0
        for request_id in self.runner.input_batch.req_ids:
            end = begin + scheduler_output.num_scheduled_tokens[request_id]
            here = positions[begin:end]
            if not torch.equal(here, torch.arange(here[0], here[0] + end - begin)):
                raise RuntimeError(f"positions of request {request_id} are not contiguous")
            row = int(request_id.split("-")[0])  # inside the worker ids end in -<8 characters>
            if self.buffer.row_offsets[row] + here[-1] >= self.buffer.row_offsets[row + 1]:
                raise RuntimeError(f"request {request_id} ran past its row, to {int(here[-1])}")
            places[begin:end] = self.buffer.row_offsets[row] + here
            begin = end
        assert begin == num_tokens, (begin, num_tokens)
        self.buffer.put(
            places, self.runner.input_ids.gpu[:num_tokens], [s[:num_tokens] for s in states]
        )


def _write(buffer: ShardBuffer, path: Path) -> dict[str, Any]:
    buffer.publish(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
