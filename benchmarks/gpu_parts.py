"""What each part of a decode step takes on a GPU, and prefill attention: copies, products, attention, small kernels.

Times are medians of replays of a CUDA graph of many calls, over inputs that rotate so that the L2 cache does not hold
them. A part that fails is told, and the others go on. One line of JSON a figure goes to OUT/parts.jsonl.

    PYTHONPATH=runtime python benchmarks/gpu_parts.py OUT [--only PART ...] [--fa3 FILE] [--split-units KEYS ...]
    PYTHONPATH=runtime TRITON_INTERPRET=1 python benchmarks/gpu_parts.py OUT --toy    # seconds, on a CPU: that it runs

FILE is FlashAttention-3 as vLLM's wheel has it (`_vllm_fa3_C.abi3.so`): the same attention by another's kernel.
"""

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kvasir_runtime.attention.backend import DecodeBounds, GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampler import draw
from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.attention_tiles import SPLIT_UNIT_KEYS
from kvasir_runtime.kernels.few_rows_triton import FewRowsWeight, Tile
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.kernels.ops_triton import triton_ops, triton_step_ops
from kvasir_runtime.kernels.paged_attention import paged_attention_reference
from kvasir_runtime.kernels.rms_norm_triton import triton_rms_norm
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import StepPlan

NUM_CALLS, NUM_REPLAYS, NUM_WARM_UPS = 20, 15, 3
ROTATED_BYTES = 400 * 10**6
"""More than any L2 cache holds."""
PAGE_SIZE = 16
MOST_CHECKED_TOKENS = 16384

Call = Callable[[], object]
Multiply = Callable[[Tensor], Tensor]
Timer = Callable[[Sequence[Call]], float]
"""Seconds a call, of calls that do the same with different inputs."""


@dataclass(frozen=True)
class Heads:
    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Sizes:
    """What is measured: each part goes through its own list."""

    copied_bytes: int
    products: dict[str, tuple[int, int]]  # name -> (out, in)
    product_rows: tuple[int, ...]
    few_rows: tuple[int, ...]
    tiles: tuple[Tile, ...]
    heads: tuple[Heads, ...]
    decodes: tuple[tuple[int, int], ...]  # (sequences, context)
    prompts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    hidden: int
    intermediate: int
    vocab: int


SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 1.0}],
    "every second greedy": [{"temperature": 1.0}, {"temperature": 0.0}],
    "top_k 20, top_p 0.95": [{"temperature": 0.6, "top_k": 20, "top_p": 0.95}],
    "top_p 0.95": [{"temperature": 0.6, "top_p": 0.95}],
    "top_p 0.9, flat": [{"temperature": 1.5, "top_p": 0.9}],
    "top_k 5000, which is searched by one program": [{"temperature": 1.0, "top_k": 5000}],
}
"""Of draws; rows take turns with them."""
REAL = Sizes(
    copied_bytes=2**32,
    products={
        "Llama-3.1-8B qkv": (6144, 4096), "Llama-3.1-8B o": (4096, 4096), "Llama-3.1-8B gate_up": (28672, 4096),
        "Llama-3.1-8B down": (4096, 14336), "Llama-3.1-8B head": (128256, 4096), "Qwen3-0.6B qkv": (4096, 1024),
        "Qwen3-0.6B o": (1024, 2048), "Qwen3-0.6B gate_up": (6144, 1024), "Qwen3-0.6B down": (1024, 3072),
        "Qwen3-0.6B head": (151936, 1024),
    },
    product_rows=(1, 8, 64),
    few_rows=(1, 2, 4, 8, 16),
    tiles=(
        Tile(16, 256, 4, 7), Tile(16, 512, 4, 4), Tile(16, 512, 4, 5), Tile(16, 512, 8, 4), Tile(16, 512, 8, 5),
        Tile(32, 256, 4, 4), Tile(32, 256, 4, 5), Tile(32, 512, 8, 3), Tile(64, 128, 2, 5), Tile(64, 256, 4, 3),
    ),
    heads=(Heads("Llama-3.1-8B", 32, 8, 128), Heads("Qwen3-0.6B", 16, 8, 128), Heads("Gemma-3-1B", 4, 1, 256)),
    decodes=((1, 1024), (1, 8192), (1, 32768), (8, 1024), (64, 1024), (64, 4096)),
    prompts=(512, 2048, 8192),
    batch_sizes=(1, 8, 64),
    hidden=4096, intermediate=14336, vocab=128256,
)  # fmt: skip
TOY = Sizes(
    2**10, {"toy": (8, 16)}, (1, 2), (1, 2), (Tile(16, 64, 2, 3),), (Heads("toy", 4, 2, 16),), ((1, 40),), (40,), (1,),
    32, 16, 1000,
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    part: str
    case: str
    microseconds: float
    terabytes_per_second: float | None = None
    teraflops: float | None = None
    error: float | None = None
    """Of the result, relative to the reference in float64."""


@dataclass(frozen=True)
class Place:
    device: torch.device
    dtype: torch.dtype
    seconds: Timer
    flash_attention: Path | None = None
    split_units: tuple[int, ...] = (SPLIT_UNIT_KEYS,)
    """Fewest keys of a decode's split, to try one after the other."""

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).mul_(0.5).to(self.dtype)


def copies(sizes: Sizes, place: Place) -> Iterator[Figure]:
    """The ceiling: what a large copy reads and writes."""
    source = torch.randint(0, 255, (sizes.copied_bytes,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    yield moved("copies", "one large copy", place.seconds([lambda: target.copy_(source)]), 2 * sizes.copied_bytes)


def products(sizes: Sizes, place: Place) -> Iterator[Figure]:
    """The products of a layer by rows: the weights' bytes beside the copy's rate."""
    for name, (num_out, num_in) in sizes.products.items():
        num_bytes = num_out * num_in * place.dtype.itemsize
        weights = [place.random(num_out, num_in) for _ in range(num_rotated(num_bytes, most=8))]
        for num_rows in sizes.product_rows:
            rows = place.random(num_rows, num_in)
            seconds = place.seconds([lambda weight=weight, rows=rows: linear(rows, weight) for weight in weights])
            yield moved("products", f"{name}, {num_rows} rows", seconds, num_bytes)


def few_rows(sizes: Sizes, place: Place) -> Iterator[Figure]:
    """Our product of few rows in every tile beside the library's, for the choice by the weight; then a norm and each
    product, which starts while the norm runs or does not."""
    for name, (num_out, num_in) in sizes.products.items():
        num_bytes = num_out * num_in * place.dtype.itemsize
        weights = [place.random(num_out, num_in) for _ in range(num_rotated(num_bytes, most=NUM_CALLS))]
        library: list[Multiply] = [partial(linear, weight=weight) for weight in weights]
        waiting = partial(FewRowsWeight, bias=None, starts_early=False)
        for num_rows in sizes.few_rows:
            rows = place.random(num_rows, num_in)
            ways = {"torch": library} | {
                str(tile): [waiting(each, tile=tile) for each in weights] for tile in sizes.tiles
            }
            for way, products in ways.items():
                seconds = place.seconds([partial(product, rows) for product in products])
                yield moved("few_rows", f"{name}, {num_rows} rows, {way}", seconds, num_bytes)
        rows, norm = place.random(1, num_in), place.random(num_in)
        ways = {"torch": library, "waits": [*map(waiting, weights)]}
        ways["starts early"] = [FewRowsWeight(weight, None) for weight in weights]
        for way, products in ways.items():
            seconds = place.seconds([partial(multiply_normed, product, rows, norm) for product in products])
            yield moved("few_rows", f"{name}, a norm and 1 row, {way}", seconds, num_bytes)


def multiply_normed(product: Multiply, rows: Tensor, norm: Tensor) -> Tensor:
    return product(triton_rms_norm(rows, norm, 1e-6))


def small_kernels(sizes: Sizes, place: Place) -> Iterator[Figure]:
    """What a launch between the products takes inside a graph."""
    ops, step_ops, part = triton_ops(), triton_step_ops(), "small_kernels"
    for batch_size in sizes.batch_sizes:
        hidden, residual, weight = (place.random(*shape, sizes.hidden) for shape in ((batch_size,), (batch_size,), ()))
        gate_up, logits = place.random(batch_size, 2 * sizes.intermediate), place.random(batch_size, sizes.vocab)
        scores = logits.float() * 4
        calls: dict[str, Call] = {
            "add_rms_norm": lambda: ops.add_rms_norm(hidden, residual, weight, 1e-5),  # noqa: B023
            "silu_and_mul": lambda: ops.silu_and_mul(gate_up),  # noqa: B023
            "argmax": lambda: step_ops.argmax(logits),  # noqa: B023
            "torch's sort": lambda: scores.sort(dim=-1),  # noqa: B023
        }
        for name, params in SAMPLINGS.items():
            calls[f"draw, {name}"] = drawing(step_ops, scores, params)
        for name, call in calls.items():
            yield Figure(part, f"{name}, {batch_size} rows", place.seconds([call]) * 1e6)


def drawing(ops: StepOps, logits: Tensor, params: Sequence[dict[str, Any]]) -> Call:
    """A draw of one position a row; the rows take turns with the parameters."""
    num_rows, vocab_size = logits.shape
    transfers = Transfers(logits.device)
    rows = Rows(
        max_num_seqs=num_rows, max_model_len=16, block_size=16, num_groups=1, max_drafts=0, vocab_size=vocab_size,
        transfers=transfers,
    )  # fmt: skip
    own = [SamplingParams(max_tokens=1, **({"seed": row} | params[row % len(params)])) for row in range(num_rows)]
    rows.sampling.write(range(num_rows), own)
    ones = np.ones(num_rows, dtype=np.int32)
    plan = StepPlan(
        number=0, added=(), forks=(), table_writes=np.empty((0, 4), np.int32), token_writes=np.empty((0, 3), np.int32),
        block_copies=np.empty((0, 2), np.int32), rows=np.arange(num_rows, dtype=np.int32), num_decodes=num_rows,
        num_new_tokens=ones, starts=0 * ones, samples=ones > 0,
    )  # fmt: skip
    positions = SampledPositionsBuilder(rows, transfers).build(plan, ones)
    return partial(draw, logits, rows, positions, positions.num_earlier, ops)


@dataclass(frozen=True)
class Attended:
    """Inputs of one attention call."""

    step: StepInputs
    cache: LayerCache
    query: Tensor
    context: int

    @property
    def table(self) -> Tensor:
        return self.step.groups[0].block_table


def decode_attention(sizes: Sizes, place: Place) -> Iterator[Figure]:
    for heads in sizes.heads:
        for num_seqs, context in sizes.decodes:
            num_bytes = 2 * num_seqs * context * heads.num_kv_heads * heads.head_dim * place.dtype.itemsize
            inputs = [
                attended(place, heads, num_seqs, 1, context) for _ in range(num_rotated(num_bytes, most=NUM_CALLS))
            ]
            case = f"{heads.model}, {num_seqs} x {context}"
            for unit in place.split_units:
                backend = TritonAttention(place.device, DecodeBounds(num_seqs, 1), split_unit_keys=unit)
                seconds = place.seconds([triton_attention(backend, each) for each in inputs])
                error = relative_error(triton_attention(backend, inputs[0])(), inputs[0])
                yield moved("decode_attention", f"{case}, splits of {unit}", seconds, num_bytes, error)
            if place.flash_attention is not None:
                seconds = place.seconds([flash_attention(place.flash_attention, each) for each in inputs])
                yield moved("decode_attention", f"{case}, FlashAttention-3", seconds, num_bytes)


def prefill_attention(sizes: Sizes, place: Place) -> Iterator[Figure]:
    for heads in sizes.heads:
        for length in sizes.prompts:
            inputs = attended(place, heads, 1, length, length)
            backend, case = TritonAttention(place.device, DecodeBounds(1, 1)), f"{heads.model}, {length} tokens"
            calls = {case: triton_attention(backend, inputs)}
            if place.flash_attention is not None:
                calls[f"{case}, FlashAttention-3"] = flash_attention(place.flash_attention, inputs)
            operations = 2 * heads.num_heads * heads.head_dim * length * length
            for name, call in calls.items():
                seconds = place.seconds([call])
                yield Figure("prefill_attention", name, seconds * 1e6, teraflops=operations / seconds / 1e12)


PARTS = {
    part.__name__: part for part in (copies, products, few_rows, small_kernels, decode_attention, prefill_attention)
}


def attended(place: Place, heads: Heads, num_seqs: int, query_len: int, context: int) -> Attended:
    """Pages in random order, each of one sequence."""
    pages_each = -(-context // PAGE_SIZE)
    pages = torch.randperm(num_seqs * pages_each, device=place.device).int().view(num_seqs, pages_each)
    kv = place.random(num_seqs * pages_each, 2, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    nothing = torch.zeros(num_seqs * query_len, dtype=torch.int64, device=place.device)
    rows = torch.arange(num_seqs + 1, dtype=torch.int32, device=place.device)
    lengths = StepLengths(np.full(num_seqs, query_len, np.int32), num_seqs if query_len == 1 else 0, context)
    step = StepInputs(
        nothing, nothing, rows * query_len, torch.full_like(rows[1:], context), rows[:-1],
        (GroupInputs(pages, nothing),), lengths,
    )  # fmt: skip
    query = place.random(num_seqs * query_len, heads.num_heads, heads.head_dim)
    return Attended(step, LayerCache(kv[:, 0], kv[:, 1], group=0), query, context)


def triton_attention(backend: TritonAttention, inputs: Attended) -> Callable[[], Tensor]:
    step, scale = backend.prepare(inputs.step), inputs.query.shape[-1] ** -0.5
    return lambda: step.attend(inputs.query, inputs.cache, scale=scale, window=None, softcap=None)


def flash_attention(library: Path, inputs: Attended) -> Call:
    torch.ops.load_library(library)
    step, query, query_len = inputs.step, inputs.query, inputs.step.lengths.max_query_len
    return lambda: torch.ops._vllm_fa3_C.fwd(
        query, inputs.cache.key, inputs.cache.value, *(None,) * 3, None, step.query_starts, *(None,) * 3, step.seq_lens,
        query_len, inputs.context, inputs.table, *(None,) * 8, query.shape[-1] ** -0.5, True, -1, -1, 0.0, True, None,
        0, None, 0, None, 1, 0, None,
    )  # fmt: skip


def relative_error(found: Tensor, inputs: Attended) -> float | None:
    """Against the reference in float64 on the host; None where that would take long."""
    step, cache = inputs.step, inputs.cache
    if len(step.rows) * inputs.context > MOST_CHECKED_TOKENS:
        return None
    query, key, value = (tensor.cpu().double() for tensor in (inputs.query, cache.key, cache.value))
    lists = (tensor.cpu() for tensor in (step.query_starts, step.seq_lens, inputs.table, step.rows))
    scale, out = query.shape[-1] ** -0.5, torch.zeros_like(query)
    wanted = paged_attention_reference(query, key, value, *lists, scale, None, None, out, None, None)
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


def moved(part: str, case: str, seconds: float, num_bytes: int, error: float | None = None) -> Figure:
    return Figure(part, case, seconds * 1e6, terabytes_per_second=num_bytes / seconds / 1e12, error=error)


def num_rotated(num_bytes: int, most: int) -> int:
    return max(1, min(most, ROTATED_BYTES // num_bytes))


def graph_seconds(calls: Sequence[Call]) -> float:
    """By events around replays of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(NUM_CALLS):
            calls[number % len(calls)]()
    milliseconds = []
    for _ in range(NUM_WARM_UPS + NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return statistics.median(milliseconds[NUM_WARM_UPS:]) / 1e3 / NUM_CALLS


def first_call_seconds(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    calls[0]()
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--fa3", type=Path, metavar="FILE")
    parser.add_argument("--split-units", type=int, nargs="+", default=[SPLIT_UNIT_KEYS], metavar="KEYS")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(argv)
    place = (
        Place(torch.device("cpu"), torch.float32, first_call_seconds)
        if options.toy
        else Place(torch.device("cuda"), torch.bfloat16, graph_seconds, options.fa3, tuple(options.split_units))
    )
    failed = []
    with (options.out / "parts.jsonl").open("a") as file:
        for name in options.only:
            try:
                for figure in PARTS[name](TOY if options.toy else REAL, place):
                    line = json.dumps(asdict(figure))
                    print(line, flush=True)
                    print(line, file=file, flush=True)
            except Exception:  # whatever a driver or compiler raises: the next part may run
                traceback.print_exc()
                failed.append(name)
    if failed:
        raise SystemExit(f"gpu_parts: {', '.join(failed)} failed, as told above")


if __name__ == "__main__":
    main()
