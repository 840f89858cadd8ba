"""vLLM's settings in one place, and a small face on its step loop.

The engine runs inside this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): no child to outlive
us, and on two cores 1.3 times the tokens a second. With tensor parallelism vLLM starts worker
processes; ``worker.py`` has the kernel end them with this one.

It is given token ids and returns token ids (``skip_tokenizer_init``): it sees exactly the tokens
01 made, and no second tokenizer can disagree.

Model runner: MRV1 (``VLLM_USE_V2_MODEL_RUNNER=0``), the one whose capture is proven on CPU; see
``worker.py``.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import vllm_cpu
from .acceptance import Acceptance
from .config import Config
from .errors import ConfigError, NoRoomError, PipelineError
from .family import is_multimodal
from .script import log
from .verifier import Verifier

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binding is 13 times slower here
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Room beyond the longest row: the token a prefill emits and the drafts beyond a row's end.
_SPARE_TOKENS = 16


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; temperature 0 is greedy. Seeds belong to the engine: a seed a
    request kills vLLM's CPU engine."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Step:
    """One step of the engine's loop.

    Attributes:
        num_running: requests in it.
        is_prefill: whether a request began with it.
        num_tokens: emitted by it.
    """

    num_running: int
    is_prefill: bool
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class Completion:
    """One finished request: the emitted token ids, the end-of-turn token included if it came."""

    index: int
    token_ids: tuple[int, ...]
    finished_by_stop: bool


class Engine:
    """A vLLM engine on the verifier, with a drafter or without.

    Args:
        drafter: an exported drafter directory to speculate with.
        num_speculative_tokens: drafted tokens a step, with a drafter.
        max_num_seqs: sequences decoded together; the config's by default.
        seed: of the sampler.

    Raises:
        ConfigError: vLLM cannot load the verifier or the drafter.
        NoRoomError: not enough memory for weights and KV cache.
    """

    def __init__(
        self,
        config: Config,
        verifier: Verifier,
        *,
        drafter: Path | None = None,
        num_speculative_tokens: int = 0,
        max_num_seqs: int | None = None,
        seed: int = 0,
    ) -> None:
        os.environ.update(_ENVIRONMENT)
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.engine.cpu_kv_cache_gib)
        start_s = time.monotonic()
        from vllm import LLM

        vllm_cpu.prepare()
        arguments: dict[str, Any] = {
            "model": str(verifier.directory),
            "dtype": config.verifier.dtype,
            "trust_remote_code": config.verifier.trust_remote_code,
            "skip_tokenizer_init": True,
            # Of a multimodal verifier only the decoder: no vision tower, no image processor.
            "language_model_only": is_multimodal(verifier.config),
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "max_model_len": max_model_len(config),
            "max_num_seqs": max_num_seqs or config.engine.max_num_seqs,
            "max_num_batched_tokens": config.engine.max_num_batched_tokens,
            "gpu_memory_utilization": config.engine.gpu_memory_utilization,
            # Cached tokens are not recomputed, so their states would be missing.
            "enable_prefix_caching": False,
            # Aux layers set outside a spec config are not in the compile cache's key.
            "enforce_eager": True,
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "eagle3.worker.CaptureWorker",
            "seed": seed,
        }
        if drafter is not None:
            # Its aux layers are the drafter's: nothing else can be captured.
            arguments["worker_extension_cls"] = "eagle3.draft_worker.DraftWorker"
            arguments["speculative_config"] = {
                "method": "eagle3",  # left out, vLLM guesses it from the directory's name
                "model": str(drafter),
                "num_speculative_tokens": num_speculative_tokens,
            }
        try:
            self._llm = LLM(**arguments)
        except (MemoryError, RuntimeError, ValueError) as error:
            raise _cannot_start(error, verifier, drafter) from error
        self._stop_ids = list(verifier.end_of_turn_ids)
        log("engine ready", took=f"{time.monotonic() - start_s:.0f}s", drafter=drafter or "none")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        concurrency: int | None = None,
        steps: list[Step] | None = None,
    ) -> Iterator[Completion]:
        """Answer token-id prompts; completions come as they finish, in any order.

        Leaving the iterator early aborts what is still running.

        Args:
            sampling: one for all prompts, or one each.
            concurrency: requests sent at a time; by default all, and the engine takes as many
                as ``max_num_seqs``.
            steps: every step of the engine is appended to it.
        """
        engine = self._llm.llm_engine
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        waiting = deque(enumerate(zip(prompts, sampling, strict=True)))
        emitted: dict[str, int] = {}  # tokens so far of each request that runs
        try:
            while waiting or emitted:
                num_begun = min(len(waiting), (concurrency or len(prompts)) - len(emitted))
                for _ in range(num_begun):
                    index, (prompt, each) = waiting.popleft()
                    request = {"prompt_token_ids": list(prompt)}
                    engine.add_request(str(index), request, self._sampling_params(each))
                    emitted[str(index)] = 0
                num_running, start_s = len(emitted), time.monotonic()
                outputs = engine.step()
                seconds = time.monotonic() - start_s
                lengths = {each.request_id: len(each.outputs[0].token_ids) for each in outputs}
                if steps is not None:
                    num_tokens = sum(n - emitted[request] for request, n in lengths.items())
                    steps.append(Step(num_running, num_begun > 0, num_tokens, seconds))
                emitted |= lengths
                for output in outputs:
                    if output.finished:
                        del emitted[output.request_id]
                        answer = output.outputs[0]
                        stopped = answer.finish_reason == "stop"
                        yield Completion(int(output.request_id), tuple(answer.token_ids), stopped)
        finally:
            if emitted:
                engine.abort_request(list(emitted))

    def _sampling_params(self, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=self._stop_ids,
            detokenize=False,
        )

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the worker extension on every worker; the answer of TP rank 0.

        It is ``worker.CaptureWorker``, or with a drafter ``draft_worker.DraftWorker``.

        Raises:
            PipelineError: that worker answered with it.
        """
        answer = self._llm.collective_rpc(method, args=args)[0]
        if isinstance(answer, PipelineError):
            raise answer
        return answer

    def acceptance(self, num_speculative_tokens: int) -> Acceptance:
        """Spec-decode counters since the engine started; take differences with ``-``."""
        counters = {metric.name: metric for metric in self._llm.get_metrics()}
        per_position = counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return Acceptance(
            num_drafts=int(counters["vllm:spec_decode_num_drafts"].value),
            accepted_per_position=tuple(int(v) for v in per_position[:num_speculative_tokens]),
        )

    def close(self) -> None:
        """Shut the engine down and give its memory back, so that another can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


def max_model_len(config: Config) -> int:
    """The engine's context: the longest row and the few tokens beyond its end."""
    return config.data.max_length_tokens + _SPARE_TOKENS


def _cannot_start(error: Exception, verifier: Verifier, drafter: Path | None) -> Exception:
    text = " ".join(str(error).split())[:400]
    if "memory" in text.lower() or isinstance(error, MemoryError):
        return NoRoomError(
            "vLLM found too little memory",
            where="engine",
            expected="room for weights, activations and KV cache",
            found=text,
            fix="free memory, or lower engine.cpu_kv_cache_gib / gpu_memory_utilization",
        )
    is_quantized = "quantization_config" in {**verifier.config, **verifier.text_config}
    if isinstance(error, NotImplementedError) and is_quantized:
        return ConfigError(
            "vLLM has no kernel here for the verifier's quantised weights",
            where=verifier.directory,
            expected="a GPU: vLLM's CPU build runs no INT4 experts",
            found=text,
            fix="run on a GPU node (a small verifier also runs here once "
            "tools/decompress_experts.py has made it plain)",
        )
    return ConfigError(
        "vLLM cannot start on these files",
        where=drafter or verifier.directory,
        expected="a verifier and drafter vLLM loads",
        found=text,
        fix="see the traceback in the stage's log",
    )
