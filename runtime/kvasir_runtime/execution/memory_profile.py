"""What a rank's memory holds besides KV pages: weights, rows, and what the largest steps take while they run."""

from collections.abc import Callable

import msgspec
import torch

from kvasir_runtime.execution.device import memory_limit_bytes, resident_bytes
from kvasir_runtime.execution.executor import StepRunner
from kvasir_runtime.execution.kv_buffer import DeviceMemory, SequenceLimits
from kvasir_runtime.execution.synthetic_steps import DEMANDING, decode_step, pooling_step, prefill_step, run
from kvasir_runtime.scheduling.step import StepPlan

LEAST_GRAPH_BYTES = 512 * 1024 * 1024
"""For CUDA graphs, beyond what a decode step of few sequences takes: the first of them brings cuBLAS's workspace."""
RECORDING_BYTES = 64 * 1024 * 1024
"""Of temporaries of decode steps on a CPU: those of 64 requests to a model of 0.6B, of 15 to one of 8B."""


def memory_before_loading(device: torch.device, weight_bytes: int, num_sharers: int = 1) -> DeviceMemory:
    """What can be said before weights are there, of a rank whose part of them takes at least so much: no more is used
    then than `measure_memory` will find."""
    if device.type == "cpu":
        used_bytes = resident_bytes() + weight_bytes + RECORDING_BYTES
        return DeviceMemory("cpu", memory_limit_bytes() // num_sharers, used_bytes)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory("cuda", total, total - free + weight_bytes)


def measure_memory(
    device: torch.device,
    make_runner: Callable[[int], StepRunner],
    limits: SequenceLimits,
    max_drafts: int,
    num_sharers: int = 1,
    is_pooling: bool = False,
) -> DeviceMemory:
    """`make_runner` makes a runner with so many pages; one that `is_pooling` draws nothing. On CPU what is used now and
    recordings are all that counts, and `num_sharers` ranks of this node have equal parts of its memory."""
    if device.type == "cpu":
        used_bytes = resident_bytes() + RECORDING_BYTES
        return DeviceMemory("cpu", memory_limit_bytes() // num_sharers, used_bytes, graph_bytes=RECORDING_BYTES)
    free, total = torch.cuda.mem_get_info(device)
    step_bytes, decode_bytes = _step_bytes(make_runner, limits, max_drafts, is_pooling)
    # CUDA graphs keep a decode step's temporaries for themselves.
    graph_bytes = max(decode_bytes, LEAST_GRAPH_BYTES)
    return DeviceMemory("cuda", total, total - free + step_bytes + graph_bytes, graph_bytes)


def _step_bytes(
    make_runner: Callable[[int], StepRunner], limits: SequenceLimits, max_drafts: int, is_pooling: bool
) -> tuple[int, int]:
    """(rows and the temporaries of the largest step, those of the largest decode), found by running over one page."""
    before = torch.cuda.memory_allocated()
    runner = make_runner(1)
    prompts, decodes = _prompts(limits), [] if is_pooling else _decodes(limits, max_drafts)
    prefill = pooling_step(prompts) if is_pooling else prefill_step(prompts, DEMANDING, max_drafts)
    prefill_bytes = _peak_bytes(runner, prefill)
    decode_bytes = max((_peak_bytes(runner, step) for step in decodes), default=0)
    rows_bytes = torch.cuda.memory_allocated() - before  # as wide as these steps' parameters
    del runner
    torch.cuda.empty_cache()
    return rows_bytes + max(prefill_bytes, decode_bytes), decode_bytes


def _peak_bytes(runner: StepRunner, plan: StepPlan) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(runner, plan)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _prompts(limits: SequenceLimits) -> list[int]:
    """Lengths that together fill a step."""
    whole, rest = divmod(limits.max_num_batched_tokens, limits.max_model_len)
    return ([limits.max_model_len] * whole + [rest] * (rest > 0))[: limits.max_num_seqs]


def _decodes(limits: SequenceLimits, max_drafts: int) -> list[StepPlan]:
    """All sequences with as many drafts as a step has room for; where those are not all drafts, as many sequences as it
    has room for with all of them, too."""
    budget, max_num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    num_drafts = min(max_drafts, budget // max_num_seqs - 1)
    sizes = [(max_num_seqs, num_drafts)]
    if num_drafts < max_drafts < budget:
        sizes.append((budget // (1 + max_drafts), max_drafts))
    decodes = (decode_step(number, drafts, limits.max_model_len, DEMANDING) for number, drafts in sizes)
    return [msgspec.structs.replace(step, num_proposals=max_drafts) for step in decodes]
