"""Compiles every Triton kernel for GPUs, with no GPU, by the calls that serving makes, which stop short of the launch;
and compares what each needs of a multiprocessor with the table beside this file.

Triton's interpreter runs whatever Python and numpy can. This finds what Triton cannot compile, and what becomes worse
unseen: registers that spill, programs that no longer fit beside each other, loads that no longer overlap.

    PYTHONPATH=runtime:. python tests/runtime/kernels/compile_kernels.py [--quick] [--write]
"""

import argparse
import csv
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvasir_runtime import kernels
from kvasir_runtime.attention.backend import DecodeBounds, GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.kernels.activation_triton import triton_gelu_tanh_and_mul, triton_silu_and_mul
from kvasir_runtime.kernels.argmax_triton import triton_argmax
from kvasir_runtime.kernels.attention_tiles import HeadShape
from kvasir_runtime.kernels.experts_triton import triton_combine_experts, triton_group_by_expert, triton_route
from kvasir_runtime.kernels.few_rows_triton import SHORT_TO, WIDE_FROM, FewRowsWeight
from kvasir_runtime.kernels.grouped_linear_triton import MANY_FROM, TritonExperts
from kvasir_runtime.kernels.inputs import DecodeTensors, InputBuffers, PlannedTokens, RowTensors, StepLengths
from kvasir_runtime.kernels.inputs_triton import triton_load_inputs, triton_prepare_inputs
from kvasir_runtime.kernels.linear_triton import TritonWeight
from kvasir_runtime.kernels.penalties_triton import triton_penalize
from kvasir_runtime.kernels.rms_norm_triton import triton_add_rms_norm, triton_rms_norm
from kvasir_runtime.kernels.rotate_and_write_triton import triton_rotate_and_write
from kvasir_runtime.kernels.sample import DrawnPositions, KnownTokens, PositionTensors, SamplingTensors
from kvasir_runtime.kernels.sample_triton import TritonSample
from kvasir_runtime.kernels.verify_drafts_triton import TritonVerifyMostLikely, triton_verify_drafts

TABLE = Path(__file__).with_name("compiled_kernels.csv")
MULTIPROCESSOR_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Shared memory; each program takes 1 KiB more than it asks for."""
PROGRAM_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The most for one program. What is compiled for 8.0 shall run on 8.6 and 8.9 (A10, L4, L40S), which have less."""
SPILL_SLACK_BYTES = 256
"""By which another Triton than the table's may spill more."""
TENSOR_CORES, FLOAT32 = "tensor cores", "float32"
"""What multiplies: float32 has no tensor cores, and ptxas spills there as it likes."""
NUM_SMS = 132
"""Of a Hopper."""
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 40, 32, 8


@dataclass(frozen=True, order=True)
class Specialization:
    arch: int
    case: str
    kernel: str


@dataclass(frozen=True)
class Figures:
    """What a compiled kernel needs, a program or a multiprocessor."""

    warps: int
    registers: int  # a thread
    stack: int  # bytes a thread: what spills
    shared: int  # bytes a program
    programs: int  # that fit beside each other into a multiprocessor
    buffers: int  # tiles of each operand that a loop keeps; 0: it loads nothing ahead
    copies: int  # still under way when the loop goes on
    dots: str  # what multiplies; "": nothing does


def compare(committed: Figures | None, compiled: Figures, arch: int, *, same_triton: bool) -> Iterator[str]:
    """What became worse. Of another Triton than the table's, only what matters whatever its registers are."""
    if compiled.shared > PROGRAM_BYTES[arch]:
        yield f"wants {compiled.shared} bytes of shared memory, a program may have {PROGRAM_BYTES[arch]}"
    if committed is None:
        yield "is not in the table"
        return
    if compiled.dots != committed.dots:
        yield f"multiplies by {compiled.dots or 'nothing'}, by {committed.dots or 'nothing'} in the table"
    if compiled.buffers < committed.buffers or compiled.copies < committed.copies:
        yield (
            f"keeps {compiled.buffers} buffers and {compiled.copies} copies under way, {committed.buffers} and "
            f"{committed.copies} in the table"
        )
    slack = 0 if same_triton else SPILL_SLACK_BYTES
    if compiled.stack > committed.stack + slack and (same_triton or compiled.dots != FLOAT32):
        yield f"spills {compiled.stack} bytes, {committed.stack} in the table"
    if same_triton and compiled.programs < committed.programs:
        yield f"fits {compiled.programs} times into a multiprocessor, {committed.programs} times in the table"


class AheadDriver:
    """As much of a driver as compiling needs. Each architecture is a device of its own to Triton's caches."""

    arch = 90

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class Compiled:
    """Kernels compiled since it was made, each once; none is launched."""

    def __init__(self) -> None:
        self.figures: dict[Specialization, Figures] = {}
        self.case = Specialization(90, "", "")
        self._seen: set[str] = set()
        compile_and_launch = JITFunction.run

        def compile_only(kernel: "JITFunction[Any]", *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if "WIDENS" in kwargs:
                kwargs["WIDENS"] = False  # the tensors only look like a CPU's
            self._note(kernel.__name__, compile_and_launch(kernel, *args, grid=grid, warmup=True, **kwargs))

        JITFunction.run = compile_only

    def _note(self, kernel: str, made: Any) -> None:
        if made.hash in self._seen:
            return
        self._seen.add(made.hash)
        name, number = kernel.removeprefix("_").removesuffix("_kernel"), 1
        found = replace(self.case, kernel=name)
        while found in self.figures:
            number += 1
            found = replace(found, kernel=f"{name} {number}")
        self.figures[found] = read_figures(made, self.case.arch)

    def missing(self) -> set[str]:
        compiled = {f"_{found.kernel.split()[0]}_kernel" for found in self.figures}
        return all_kernels() - compiled


def read_figures(made: Any, arch: int) -> Figures:
    registers, stack = resource_usage(made.asm["cubin"])
    loop = made.asm["ttgir"]
    warps, shared = made.metadata.num_warps, made.metadata.shared
    buffers = re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)(?:x\d+){2,3}x(?:bf16|f16|f32)", loop)
    copies = re.findall(r"async_wait [^\n]*num = (\d+)", loop)
    dots = ""
    if "tt.dot " in made.asm["ttir"]:
        has_matrix = re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", made.asm["ptx"])
        dots = TENSOR_CORES if has_matrix else FLOAT32
    return Figures(
        warps=warps,
        registers=registers,
        stack=stack,
        shared=shared,
        programs=min(
            65536 // (-(-registers // 8) * 8 * 32 * warps),
            MULTIPROCESSOR_BYTES[arch] // (shared + 1024),
            64 // warps,
            32,
        ),
        buffers=min(map(int, buffers), default=0),
        copies=max(map(int, copies), default=0),
        dots=dots,
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread, by the tool that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes, for a Hopper alone: every kernel once")
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    options = parser.parse_args()
    compiled = compile_all([90] if options.quick else [80, 90, 100], CASES[:NUM_QUICK] if options.quick else CASES)
    if missing := compiled.missing():
        sys.exit(f"nothing here calls {', '.join(sorted(missing))}: add the call that serving makes")
    if options.write:
        return write_table((read_table()[1] if options.quick else {}) | compiled.figures)
    version, committed = read_table()
    worse = [
        f"sm{found.arch} {found.kernel} of {found.case} {problem}"
        for found, figures in compiled.figures.items()
        for problem in compare(committed.get(found), figures, found.arch, same_triton=version == triton.__version__)
    ]
    if worse:
        sys.exit("\n".join([*worse, f"If that is meant: {Path(__file__).name} --write (now of Triton {version})"]))
    print(f"{len(compiled.figures)} kernels compiled by Triton {triton.__version__}, none worse than {version}'s table")


def compile_all(archs: Iterable[int], cases: "Iterable[tuple[str, Callable[[], None]]]") -> Compiled:
    for module in pkgutil.iter_modules(kernels.__path__, "kvasir_runtime.kernels."):
        if module.name.endswith("_triton"):
            importlib.import_module(module.name)
    active = AheadDriver()
    driver.set_active(active)
    compiled = Compiled()
    for arch in archs:
        active.arch = arch
        for name, launch in cases:
            compiled.case = Specialization(arch, name, "")
            launch()
    return compiled


def write_table(figures: dict[Specialization, Figures]) -> None:
    with TABLE.open("w", newline="") as file:
        file.write(f"# Triton {triton.__version__}\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(field.name for part in (Specialization, Figures) for field in fields(part))
        table.writerows((*astuple(found), *astuple(figures[found])) for found in sorted(figures))


def read_table() -> tuple[str, dict[Specialization, Figures]]:
    """(Triton's version, figures)."""
    with TABLE.open() as file:
        version = file.readline().removeprefix("# Triton ").strip()
        rows = list(csv.DictReader(file))
    numbers = [{name: int(text) if text.isdigit() else text for name, text in row.items()} for row in rows]
    keys = [field.name for field in fields(Specialization)]
    return version, {
        Specialization(*(row[key] for key in keys)): Figures(**{k: v for k, v in row.items() if k not in keys})
        for row in numbers
    }


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
    TritonWeight(of(4096, 4096), None)(hidden)
    for num_outputs, num_inputs in ((4096, 4096), (4096, SHORT_TO), (WIDE_FROM, 512)):
        FewRowsWeight(of(num_outputs, num_inputs), None)(of(1, num_inputs))
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
    sample(logits)
    for vocab_size in (128_256, 262_144):
        sample(of(8, vocab_size))
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


def sample(logits: Tensor) -> None:
    floats, number, row, none = of(8, dtype=torch.float32), ints(8), longs(8), longs(8, 0)
    tensors = SamplingTensors(
        *(floats,) * 6, number, number, row, row, none, row, none, floats, ints(8, 1000), number, ints(8, 5)
    )
    positions = PositionTensors(row, row, row, None, is_random=True, has_nucleus=True)
    TritonSample()(logits, positions, tensors)
    if logits.dtype == torch.float32:
        triton_penalize(logits, positions, tensors, max_seq_len=1000)


def compile_attention(
    heads: HeadShape, dtype: torch.dtype = torch.bfloat16, *, max_decode_len: int = 1, has_prefill: bool = True,
    window: int | None = None, softcap: float | None = None, page: int = 16,
) -> None:  # fmt: skip
    """Two decodes, and a chunk of a prompt."""
    chunk = [NUM_TOKENS - 2 * max_decode_len] if has_prefill else []
    lengths = np.array([max_decode_len, max_decode_len, *chunk], dtype=np.int32)
    num_tokens, num_requests = int(lengths.sum()), len(lengths)
    groups = (GroupInputs(ints(8, 600), longs(num_tokens)),)
    inputs = StepInputs(
        longs(num_tokens), longs(num_tokens), ints(num_requests + 1), ints(num_requests), ints(num_requests), groups,
        StepLengths(lengths, 2, 8192),
    )  # fmt: skip
    bounds = DecodeBounds(8, max_decode_len)
    shared_bytes = PROGRAM_BYTES[driver.active.get_current_target().arch]
    backend = TritonAttention(torch.device("cpu"), bounds, num_sms=NUM_SMS, shared_bytes=shared_bytes)
    step = backend.prepare(inputs)
    caches = of(4, 2, 2, page, heads.num_kv_heads, heads.head_dim, dtype=dtype)  # blocks, layers, keys and values
    cache = LayerCache(caches[:, 1, 0], caches[:, 1, 1], group=0)
    query = of(num_tokens, heads.num_heads, heads.head_dim, dtype=dtype)
    step.attend(query, cache, scale=0.1, window=window, softcap=softcap)


LLAMA_1B, LLAMA_8B, LLAMA_70B = HeadShape(32, 8, 64), HeadShape(32, 8, 128), HeadShape(64, 8, 128)
QWEN2_05B, QWEN2_7B, QWEN3_06B, QWEN3_235B = (
    HeadShape(14, 2, 64), HeadShape(28, 4, 128), HeadShape(16, 8, 128), HeadShape(64, 4, 128)
)  # fmt: skip
PHI3_MINI, GEMMA2_9B, GEMMA3_1B = HeadShape(32, 32, 96), HeadShape(16, 8, 256), HeadShape(4, 1, 256)
decodes = partial(compile_attention, has_prefill=False)
CASES: list[tuple[str, Callable[[], None]]] = [
    ("layers", compile_layers),
    ("8 experts, few rows", partial(compile_experts, num_tokens=1)),
    ("step", compile_step),
    ("Llama-8B", partial(compile_attention, LLAMA_8B)),
    ("Gemma-2-9B", partial(compile_attention, GEMMA2_9B, window=4096, softcap=50.0)),
    ("Qwen3-235B, 5 drafts", partial(decodes, QWEN3_235B, max_decode_len=6)),
    ("8 experts, many rows", partial(compile_experts, num_tokens=MANY_FROM * 8)),
    ("Qwen3-0.6B", partial(compile_attention, QWEN3_06B)),
    ("Llama-1B", partial(compile_attention, LLAMA_1B)),
    ("Qwen2-0.5B", partial(compile_attention, QWEN2_05B)),
    ("Qwen2-7B", partial(compile_attention, QWEN2_7B)),
    ("Phi-3-mini", partial(compile_attention, PHI3_MINI)),
    ("Phi-3-mini, window", partial(compile_attention, PHI3_MINI, window=2047)),
    ("Gemma-3-1B", partial(compile_attention, GEMMA3_1B)),
    ("Llama-70B", partial(compile_attention, LLAMA_70B)),
    ("Qwen3-235B", partial(compile_attention, QWEN3_235B)),
    ("Llama-8B, pages of 128", partial(compile_attention, LLAMA_8B, page=128)),
    *(
        (f"{name}, {num_drafts} drafts", partial(decodes, heads, max_decode_len=1 + num_drafts))
        for name, heads, drafts in [
            ("Llama-1B", LLAMA_1B, (5, 10)), ("Llama-8B", LLAMA_8B, (1, 5, 10)), ("Llama-70B", LLAMA_70B, (5, 10)),
            ("Qwen3-235B", QWEN3_235B, (10,)), ("Gemma-2-9B", GEMMA2_9B, (5,)), ("Gemma-3-1B", GEMMA3_1B, (5, 10)),
        ]
        for num_drafts in drafts
    ),
    ("Llama-8B, float16", partial(compile_attention, LLAMA_8B, torch.float16)),
    ("Llama-1B, float32", partial(compile_attention, LLAMA_1B, torch.float32)),
    ("Llama-8B, float32", partial(compile_attention, LLAMA_8B, torch.float32)),
    ("Gemma-2-9B, float32", partial(compile_attention, GEMMA2_9B, torch.float32)),
    ("Llama-8B, float32, 5 drafts", partial(decodes, LLAMA_8B, torch.float32, max_decode_len=6)),
]  # fmt: skip
NUM_QUICK = 6
"""The first ones, which call every kernel."""


if __name__ == "__main__":
    main()
