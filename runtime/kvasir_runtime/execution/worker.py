"""Makes one rank ready: device, weights, KV cache, warm-up step. The result is the runner and what others must know."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvasir_runtime.attention.select import select_backend
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.engine.messages import SamplingParams
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.device import (
    memory_limit_bytes,
    resident_bytes,
    select_device,
    select_dtype,
    usable_cores,
)
from kvasir_runtime.execution.input_batch import RequestRows
from kvasir_runtime.execution.kv_buffer import DeviceMemory, allocate_kv_cache, block_bytes, num_kv_blocks
from kvasir_runtime.execution.model_runner import ModelRunner
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops, cpu_ops
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import Placement, load_decoder
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.scheduling.batch import NewRequest, ScheduledBatch, ScheduledRequest

_DEFAULT_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    runner: ModelRunner
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    attention_backend: str
    device: torch.device
    startup_seconds: dict[str, float]
    """Phase -> seconds."""
    prepare_thread: Callable[[], None]
    """To be called on the thread that runs steps: how many cores a kernel uses is a thread's own setting."""


def load_worker(
    model: ModelConfig, cache: CacheConfig, execution: ExecutionConfig, scheduler: SchedulerConfig
) -> Worker:
    """Load the model and take the memory for its KV cache. Raises ConfigurationError, ModelLoadError."""
    phases = _Phases()
    device = select_device(model.device)
    num_threads = execution.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    config = read_config(Path(model.model))
    options = read_options(config)
    max_model_len = _max_model_len(options, model.max_model_len)
    max_num_batched_tokens = _max_num_batched_tokens(scheduler, device, max_model_len)
    make_linear = _LinearMaker(execution.linear_path)
    placement = Placement(
        device=device,
        dtype=select_dtype(model.dtype, config.dtype),
        ops=_ops_of(device),
        backend=select_backend(execution.attention_backend, device),
        make_linear=make_linear,
    )
    with phases.measure("load_weights"), Checkpoint(Path(model.model)) as checkpoint:
        decoder = load_decoder(checkpoint, options, placement, max_model_len)
    phases.move(make_linear.seconds, "load_weights", "measure_linear")
    with phases.measure("allocate_kv"):
        factory = _RunnerFactory(decoder, placement, cache.block_size, scheduler.max_num_seqs, max_model_len)
        num_blocks = factory.num_blocks(cache, max_num_batched_tokens)
        runner = factory.runner(num_blocks)
    with phases.measure("warm_up"):
        run_synthetic_step(runner, [1], cache.block_size)
    return Worker(
        runner=runner,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=options.vocab_size,
        attention_backend=placement.backend.name,
        device=device,
        startup_seconds=phases.seconds,
        prepare_thread=partial(torch.set_num_threads, num_threads),
    )


def _ops_of(device: torch.device) -> Ops:
    if device.type == "cpu":
        return cpu_ops()
    from kvasir_runtime.kernels.ops_triton import triton_ops  # takes a second to import, for nothing on CPUs

    return triton_ops()


def _max_model_len(options: DecoderOptions, wanted: int | None) -> int:
    """The context served. Raises ConfigurationError when the model cannot serve what is wanted exactly."""
    limits = [rope.max_exact_length for rope in (layer.rope for layer in options.layers)]
    exact = min((limit for limit in limits if limit is not None), default=options.max_position_embeddings)
    if wanted is None and exact < options.max_position_embeddings:
        raise ConfigurationError(
            f"the model declares {options.max_position_embeddings} positions, but its rope scaling is exact only up to "
            f"{exact} tokens (beyond, they follow each sequence's length): pass --max-model-len {exact}"
        )
    most = min(exact, options.max_position_embeddings)
    if wanted is not None and not 1 <= wanted <= most:
        raise ConfigurationError(f"--max-model-len {wanted}: expected 1 to {most}, the positions that the model has")
    return most if wanted is None else wanted


def _max_num_batched_tokens(scheduler: SchedulerConfig, device: torch.device, max_model_len: int) -> int:
    """The step's token budget. Without chunked prefill a whole prompt must fit into it. Raises ConfigurationError."""
    wanted = scheduler.max_num_batched_tokens
    default = max(_DEFAULT_BATCHED_TOKENS[device.type], scheduler.max_num_seqs)
    if scheduler.enable_chunked_prefill:
        return default if wanted is None else wanted
    if wanted is not None and wanted < max_model_len:
        raise ConfigurationError(
            f"--max-num-batched-tokens {wanted} is less than max_model_len {max_model_len}, so a long prompt would "
            "never fit into a step: raise it, lower --max-model-len, or leave chunked prefill on"
        )
    return max(default, max_model_len) if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class _RunnerFactory:
    """Makes runners of the same model over KV caches of different sizes."""

    decoder: Decoder
    placement: Placement
    block_size: int
    max_num_seqs: int
    max_model_len: int

    def runner(self, num_blocks: int) -> ModelRunner:
        options, placement = self.decoder.options, self.placement
        rows = RequestRows(self.max_num_seqs, self.max_model_len, self.block_size, options.vocab_size)
        kv_cache = allocate_kv_cache(options, num_blocks, self.block_size, placement.dtype, placement.device)
        return ModelRunner(self.decoder, placement.ops, rows, kv_cache)

    def num_blocks(self, cache: CacheConfig, max_num_batched_tokens: int) -> int:
        """As many as the memory left allows."""
        return num_kv_blocks(
            cache,
            block_bytes(self.decoder.options, self.block_size, self.placement.dtype),
            self._memory(max_num_batched_tokens),
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
        )

    def _memory(self, max_num_batched_tokens: int) -> DeviceMemory:
        """On CUDA the largest step's activations count as used; they are found by running one over a passing cache."""
        if self.placement.device.type == "cpu":
            return DeviceMemory("cpu", memory_limit_bytes(), resident_bytes())
        torch.cuda.reset_peak_memory_stats()
        num_blocks = -(-max_num_batched_tokens // self.block_size) + self.max_num_seqs
        run_synthetic_step(self.runner(num_blocks), self._lengths(max_num_batched_tokens), self.block_size)
        activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory("cuda", total, total - free + activations)

    def _lengths(self, num_tokens: int) -> list[int]:
        """Prompts that together fill a step."""
        whole, rest = divmod(num_tokens, self.max_model_len)
        return ([self.max_model_len] * whole + [rest] * (rest > 0))[: self.max_num_seqs]


def run_synthetic_step(runner: ModelRunner, lengths: list[int], block_size: int) -> None:
    """Compute prompts of the given lengths once, in the first blocks, and forget them."""
    batch = ScheduledBatch((), (), (), 0)
    first_block = 0
    for index, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        blocks = tuple(range(first_block, first_block + num_blocks))
        first_block += num_blocks
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        new = NewRequest(f"synthetic-{index}", [0] * length, length, sampling)
        share = ScheduledRequest(new.request_id, 0, length, blocks, samples=True)
        batch = replace(batch, new_requests=(*batch.new_requests, new), requests=(*batch.requests, share))
    runner.run(batch)
    runner.forget([new.request_id for new in batch.new_requests])


class _Phases:
    """Times the steps of starting up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Book part of a phase under a name of its own."""
        self.seconds[source] -= seconds
        self.seconds[target] = seconds


class _LinearMaker:
    """Makes linear layers and keeps count of the time, most of it spent on measuring compute paths."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.seconds = 0.0

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        start = time.perf_counter()
        linear = Linear(weight, bias, path=self._path)
        self.seconds += time.perf_counter() - start
        return linear
