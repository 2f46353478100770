"""Compiles every Triton kernel for a Hopper GPU, with no GPU: by the calls that serving makes, which stop short of the
launch. Prints the shared memory of each compilation.

Triton's interpreter runs whatever Python and numpy can; this is what finds a construct that Triton cannot compile.

    PYTHONPATH=runtime:. python tests/runtime/kernels/compile_kernels.py [--all]    # sizes, too, that tests leave out
"""

import argparse
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvasir_runtime.attention.backend import GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.step_lengths import DecodeBounds, StepLengths
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.kernels.activation_triton import triton_gelu_tanh_and_mul, triton_silu_and_mul
from kvasir_runtime.kernels.argmax_triton import triton_argmax
from kvasir_runtime.kernels.combine_experts_triton import triton_combine_experts
from kvasir_runtime.kernels.expert_groups_triton import triton_group_by_expert
from kvasir_runtime.kernels.expert_routing_triton import triton_route
from kvasir_runtime.kernels.grouped_linear_triton import MANY_FROM, TritonExperts
from kvasir_runtime.kernels.load_inputs import DecodeTensors
from kvasir_runtime.kernels.load_inputs_triton import triton_load_inputs
from kvasir_runtime.kernels.look_up_triton import TritonLookUp
from kvasir_runtime.kernels.philox_triton import triton_uniform
from kvasir_runtime.kernels.prepare_inputs import InputBuffers, PlannedTokens, RowTensors
from kvasir_runtime.kernels.prepare_inputs_triton import triton_prepare_inputs
from kvasir_runtime.kernels.rms_norm_triton import triton_add_rms_norm, triton_rms_norm
from kvasir_runtime.kernels.rotate_and_write_triton import triton_rotate_and_write
from kvasir_runtime.kernels.top_k_top_p_triton import TritonLeastLikelyKept
from kvasir_runtime.kernels.verify_drafts import DrawnPositions, KnownTokens
from kvasir_runtime.kernels.verify_drafts_triton import TritonVerifyMostLikely, triton_verify_drafts

SHARED_BYTES = 227 * 1024
"""That a program may use."""
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 40, 32, 8


class HopperDriver:
    """As much of a driver as compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Kernels compiled since it was made; none is launched."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        compile_and_launch = JITFunction.run

        def compile_only(kernel: "JITFunction[Any]", *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if "WIDENS" in kwargs:
                kwargs["WIDENS"] = False  # the tensors only look like a CPU's
            made = compile_and_launch(kernel, *args, grid=grid, warmup=True, **kwargs)
            self.names.add(kernel.__name__)
            print(kernel.__name__, made.metadata.shared, "bytes of shared memory", flush=True)
            assert made.metadata.shared <= SHARED_BYTES, f"{kernel.__name__} wants more than a multiprocessor has"

        JITFunction.run = compile_only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    has_all = parser.parse_args().all
    driver.set_active(HopperDriver())
    compiled = Compiled()
    compile_layers()
    compile_experts(num_tokens=1)
    compile_step()
    compile_attention(128, torch.bfloat16, max_decode_len=6, window=1024, softcap=30.0)
    if has_all:
        compile_experts(num_tokens=MANY_FROM * 8)
        for head_dim in (64, 128, 256):
            for dtype in (torch.bfloat16, torch.float32):
                compile_attention(head_dim, dtype, max_decode_len=1, window=None, softcap=None)
    missing = all_kernels() - compiled.names
    if missing:
        sys.exit(f"nothing here calls {', '.join(sorted(missing))}: add the call that serving makes")


def all_kernels() -> set[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("kvasir_runtime.kernels.")]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    return {kernel.__name__ for kernel in found if kernel.__name__.endswith("_kernel")}


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def longs(*shape: int) -> Tensor:
    return of(*shape, dtype=torch.int64)


def ints(*shape: int) -> Tensor:
    return of(*shape, dtype=torch.int32)


def compile_layers() -> None:
    hidden, weight = of(NUM_TOKENS, 4096), of(4096)
    triton_rms_norm(hidden, weight, 1e-6)
    triton_add_rms_norm(hidden, hidden, weight, 1e-6)
    triton_silu_and_mul(hidden)
    triton_gelu_tanh_and_mul(hidden)
    for head_dim, norm in ((128, of(128)), (256, None)):
        query, key = of(NUM_TOKENS, NUM_HEADS, head_dim), of(NUM_TOKENS, NUM_KV_HEADS, head_dim)
        caches = of(2, 10, 16, NUM_KV_HEADS, head_dim)
        angles = of(100, head_dim, dtype=torch.float32)
        places = longs(NUM_TOKENS)
        triton_rotate_and_write(query, key, key, *caches, angles, angles, places, places, norm, norm, 1e-6)


def compile_experts(num_tokens: int) -> None:
    experts = TritonExperts(iter(of(8, 128, 256)), 8)
    for renormalises in (True, False):
        routing = triton_route(of(num_tokens, 60), 6, renormalises)
    groups = triton_group_by_expert(routing.experts, range(8))
    experts.multiply_tokens(of(num_tokens, 256), groups)
    triton_combine_experts(experts.multiply_pairs(of(6 * num_tokens, 256), groups), routing, range(8))


def compile_step() -> None:
    planned = PlannedTokens(ints(4), ints(5), num_decodes=4, num_tokens=8, max_query_len=2)
    out = InputBuffers(longs(64), longs(64), longs(1, 64), ints(9), ints(8))
    for max_drafts in (0, 5):
        state = RowTensors(ints(8, 1000), ints(8), ints(8, max_drafts), ints(1, 8, 100))
        triton_prepare_inputs(state, planned, 16, out)
    logits = of(8, 128_256, dtype=torch.float32)
    triton_argmax(logits)
    triton_argmax(logits.bfloat16())
    for top_k in (None, ints(8)):
        TritonLeastLikelyKept()(logits, top_k, of(8, dtype=torch.float32))
    TritonLookUp()(logits, of(8, dtype=torch.float64))
    triton_uniform(longs(8), longs(8))
    for num_tokens in (4, 8):
        tensors = DecodeTensors(
            longs(num_tokens), longs(num_tokens), (longs(num_tokens),) * 2, ints(5), ints(4), ints(4)
        )
        triton_load_inputs(tensors, tensors)
    for max_drafts in (0, 5):
        drawn = DrawnPositions(longs(8), ints(5), ints(4), of(4, dtype=torch.bool), width=2)
        known = KnownTokens(ints(8, 1000), ints(8), ints(8), ints(8, max_drafts))
        triton_verify_drafts(longs(8), drawn, known)
        for dtype in (torch.bfloat16, torch.float32):
            TritonVerifyMostLikely()(logits.to(dtype), drawn, known)


def compile_attention(
    head_dim: int, dtype: torch.dtype, *, max_decode_len: int, window: int | None, softcap: float | None
) -> None:
    """Two decodes and a chunk of a prompt."""
    lengths = np.array([max_decode_len, max_decode_len, NUM_TOKENS - 2 * max_decode_len], dtype=np.int32)
    groups = (GroupInputs(ints(8, 600), longs(NUM_TOKENS)),)
    inputs = StepInputs(
        longs(NUM_TOKENS), longs(NUM_TOKENS), ints(4), ints(3), ints(3), groups, StepLengths(lengths, 2, 8192)
    )
    caches = of(2, 10, 16, NUM_KV_HEADS, head_dim, dtype=dtype)
    step = TritonAttention(torch.device("cpu"), DecodeBounds(8, max_decode_len)).prepare(inputs)
    query = of(NUM_TOKENS, NUM_HEADS, head_dim, dtype=dtype)
    step.attend(query, LayerCache(caches[0], caches[1], group=0), scale=0.1, window=window, softcap=softcap)


if __name__ == "__main__":
    main()
