"""Makes one rank ready: device, weights, proposer, KV cache, warm-up. The result is the runner and what others must
know of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend
from kvasir_runtime.attention.select import select_backend
from kvasir_runtime.attention.step_lengths import DecodeBounds
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.execution.device import select_device, select_dtype, usable_cores
from kvasir_runtime.execution.kv_buffer import SequenceLimits, num_kv_blocks
from kvasir_runtime.execution.limits import resolve_max_model_len, resolve_max_num_batched_tokens
from kvasir_runtime.execution.memory_profile import measure_memory
from kvasir_runtime.execution.model_runner import ModelRunner
from kvasir_runtime.execution.runner_assembly import RunnerAssembly
from kvasir_runtime.execution.startup_timer import StartupTimer
from kvasir_runtime.execution.synthetic_steps import DEMANDING, GREEDY, decode_step, prefill_step, run
from kvasir_runtime.kernels.linear import make_weight
from kvasir_runtime.kernels.linear_weight import LinearWeight
from kvasir_runtime.kernels.ops import Ops, cpu_ops
from kvasir_runtime.kernels.step_ops import StepOps, cpu_step_ops
from kvasir_runtime.kv_cache.spec import KvLayout
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.proposer import Proposer

ProposerFactory = Callable[[Decoder, Placement, AttentionBackend, int], Proposer]
"""Makes the proposer for a target decoder, where it is placed, its attention backend, and for max_model_len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A rank that is ready to run steps."""

    runner: ModelRunner
    layout: KvLayout
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
    model: ModelConfig,
    cache: CacheConfig,
    execution: ExecutionConfig,
    scheduler: SchedulerConfig,
    make_proposer: ProposerFactory | None = None,
) -> Worker:
    """Load the model and take the memory for its KV cache. Raises ConfigurationError, ModelLoadError."""
    timer = StartupTimer()
    device = select_device(model.device)
    num_threads = execution.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    config = read_config(Path(model.model))
    options = read_options(config)
    max_model_len = resolve_max_model_len(options, model.max_model_len)
    max_drafts = _max_drafts(execution) if make_proposer is not None else 0
    budget = resolve_max_num_batched_tokens(scheduler, device, max_model_len, max_drafts)
    placement = Placement(
        device=device,
        dtype=select_dtype(model.dtype, config.dtype),
        ops=_ops_of(device),
        make_weight=partial(_measured_weight, timer, execution.linear_path),
    )
    backend = select_backend(execution.attention_backend, device, DecodeBounds(scheduler.max_num_seqs, 1 + max_drafts))
    with timer.measure("load_weights"):
        with Checkpoint(Path(model.model)) as checkpoint:
            decoder = load_decoder(checkpoint, options, placement, max_model_len)
        proposer = None if make_proposer is None else make_proposer(decoder, placement, backend, max_model_len)
    with timer.measure("allocate_kv"):
        assembly = RunnerAssembly(
            decoder=decoder,
            proposer=proposer,
            placement=placement,
            backend=backend,
            step_ops=_step_ops_of(device),
            block_size=cache.block_size,
            limits=SequenceLimits(scheduler.max_num_seqs, max_model_len, budget),
            max_drafts=max_drafts,
        )
        memory = measure_memory(device, assembly.runner, assembly.limits, max_drafts)
        num_blocks = num_kv_blocks(cache, assembly.layout, memory, assembly.limits)
        runner = assembly.runner(num_blocks, memory.graph_bytes)
    with timer.measure("warm_up"):
        _warm_up(runner, assembly.limits, max_drafts)
    return Worker(
        runner=runner,
        layout=assembly.layout,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        vocab_size=options.vocab_size,
        attention_backend=assembly.backend.name,
        device=device,
        startup_seconds=timer.seconds,
        prepare_thread=partial(torch.set_num_threads, num_threads),
    )


def _max_drafts(execution: ExecutionConfig) -> int:
    return 0 if execution.speculative_config is None else execution.speculative_config.num_speculative_tokens


def _ops_of(device: torch.device) -> Ops:
    if device.type == "cpu":
        return cpu_ops()
    from kvasir_runtime.kernels.ops_triton import triton_ops  # takes a second to import, for nothing on CPUs

    return triton_ops()


def _step_ops_of(device: torch.device) -> StepOps:
    if device.type == "cpu":
        return cpu_step_ops()
    from kvasir_runtime.kernels.step_ops_triton import triton_step_ops

    return triton_step_ops()


def _measured_weight(timer: StartupTimer, path: str, weight: Tensor, bias: Tensor | None) -> LinearWeight:
    """Most of the time goes into measuring compute paths."""
    with timer.measure("measure_linear"):
        return make_weight(weight, bias, path=path)


def _warm_up(runner: ModelRunner, limits: SequenceLimits, max_drafts: int) -> None:
    """Run every kernel that serving runs: a prefill, and decodes with and without all that sampling can do."""
    length = min(2, limits.max_model_len)
    num_drafts = min(max_drafts, limits.max_model_len - 1, limits.max_num_batched_tokens - 1)
    for sampling in (GREEDY, DEMANDING):
        run(runner, prefill_step([length], sampling, max_drafts))
        run(runner, decode_step(1, num_drafts, length, sampling))
