"""The limits that a rank serves within, from what the user wants and what the model and the device can."""

import logging

import torch

from kvasir_runtime.config import CacheConfig, SchedulerConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.kv_buffer import (
    DEFAULT_SHARE,
    DeviceMemory,
    SequenceLimits,
    blocks_of_sequence,
    longest_sequence,
    num_kv_blocks,
    usable_bytes,
)
from kvasir_runtime.kv_cache.spec import KvLayout
from kvasir_runtime.models.options import DecoderOptions

logger = logging.getLogger(__name__)

SHORTEST_CUT = 512
"""Tokens of context below which an engine is of no use to anybody who did not ask for so few."""
_DEFAULT_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}


def resolve_max_model_len(options: DecoderOptions, wanted: int | None) -> int:
    """The context served. Raises ConfigurationError when the model cannot serve what is wanted exactly."""
    most = options.max_exact_length
    if wanted is None and most < options.max_position_embeddings:
        raise ConfigurationError(
            f"the model declares {options.max_position_embeddings} positions, but its rope scaling is exact only up to "
            f"{most} tokens (beyond, they follow each sequence's length): pass --max-model-len {most}"
        )
    if wanted is not None and not 1 <= wanted <= options.max_length:
        raise ConfigurationError(
            f"--max-model-len {wanted}: expected 1 to {options.max_length}, the positions that the model has "
            "(max_position_embeddings and rope scaling in config.json)"
        )
    return most if wanted is None else wanted


def resolve_max_num_batched_tokens(
    scheduler: SchedulerConfig, device: torch.device, max_model_len: int, max_drafts: int
) -> int:
    """The step's token budget. Raises ConfigurationError when a step could not do what it must.

    Every running sequence decodes in every step; without chunked prefill a whole prompt must fit into one, too.
    """
    wanted = scheduler.max_num_batched_tokens
    default = max(_DEFAULT_BATCHED_TOKENS[device.type], scheduler.max_num_seqs * (1 + max_drafts))
    if wanted is not None and wanted < scheduler.max_num_seqs:
        raise ConfigurationError(
            f"--max-num-batched-tokens {wanted}: expected at least --max-num-seqs {scheduler.max_num_seqs}, one token "
            "for each running sequence: raise it, or lower --max-num-seqs"
        )
    if scheduler.enable_chunked_prefill:
        return default if wanted is None else wanted
    if wanted is not None and wanted < max_model_len:
        raise ConfigurationError(
            f"--max-num-batched-tokens {wanted} is less than max_model_len {max_model_len}, so a long prompt would "
            "never fit into a step: raise it, lower --max-model-len, or leave chunked prefill on"
        )
    return max(default, max_model_len) if wanted is None else wanted


def check_weights_fit(cache: CacheConfig, memory: DeviceMemory, weight_bytes: int, dtype: torch.dtype) -> None:
    """Raises ConfigurationError where a rank's weights, whose bytes count as used, leave nothing for its KV cache."""
    usable = usable_bytes(cache, memory)
    if memory.used_bytes < usable:
        return
    limit, others = memory.limit_bytes, memory.used_bytes - weight_bytes
    raise ConfigurationError(
        f"the weights do not fit: as {str(dtype).removeprefix('torch.')} they take {_gib(weight_bytes)} of this rank, "
        f"which may use {_gib(usable)} of {_gib(limit)} in all, and {_gib(others)} are in use already: take a smaller "
        "model or --dtype, raise --gpu-memory-utilization or the memory limit, or spread the model over more ranks "
        "(--tensor-parallel-size)"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def fitted_max_model_len(
    cache: CacheConfig, layout: KvLayout, memory: DeviceMemory, limits: SequenceLimits, *, is_wanted: bool
) -> int:
    """max_model_len, or where it is the model's own and not one request of it fits, what fits, with a warning. Raises
    ConfigurationError where the user wants what does not fit, or hardly anything fits."""
    num_blocks, asked = num_kv_blocks(cache, layout, memory, limits), limits.max_model_len
    fitting = longest_sequence(layout, num_blocks, limits)
    if fitting == asked:
        return asked
    num_needed = blocks_of_sequence(layout, asked, limits.max_num_batched_tokens)
    why = (
        f"the KV cache holds {num_blocks} blocks of {layout.block_size} tokens, but one request of max_model_len "
        f"{asked} needs {num_needed}"
    )
    more = (
        f"give the cache more with --kv-cache-memory-bytes (one request takes {num_needed * layout.page_bytes} bytes), "
        f"--gpu-memory-utilization (default here: {DEFAULT_SHARE[memory.device_type]:g}), --num-gpu-blocks-override or "
        "a higher memory limit"
    )
    if is_wanted or fitting < SHORTEST_CUT:
        shorter = f"lower --max-model-len to at most {fitting}, or " if fitting else ""
        raise ConfigurationError(f"{why}: {shorter}{more}")
    logger.warning("max_model_len is cut from %d to %d tokens: %s; for more, %s", asked, fitting, why, more)
    return fitting
