"""Speed of the CPU kernels beside torch's own, for the linear layers, attention and sampling of two model shapes.

Candidates take turns and the least time of each counts. With one thread it is processor time, which other load on the
machine hardly touches; with more it is wall time, so look at the load that is printed.

    PYTHONPATH=runtime python benchmarks/kernels_cpu.py [--threads 1] [--only sampling]
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kvasir_runtime.attention.backend import GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampler import draw
from kvasir_runtime.execution.step_inputs import SampledPositions, SampledPositionsBuilder
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.kernels.linear import VARIANTS
from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.step_ops import cpu_step_ops, reference_step_ops
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import StepPlan

ROUNDS = 5
WEIGHT_BYTES = 150_000_000
"""Copies of each weight that are gone through in turn, so that weights come from memory as in a model."""


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each kind of linear layer."""
        query_size = self.num_heads * self.head_dim
        return {
            "qkv": (query_size + 2 * self.num_kv_heads * self.head_dim, self.hidden),
            "output": (self.hidden, query_size),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


SHAPES = (
    ModelShape("llama-100m", 768, 2048, 12, 4, 64, 32_000),
    ModelShape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151_936),
)
KERNELS = ("sampling", "attention", "linear")
QWEN3 = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
"""Its generation_config.json."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "qwen3": QWEN3,
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_p of flat logits": {"temperature": 1.0, "top_p": 0.95},
    "greedy, presence penalty": {"temperature": 0.0, "presence_penalty": 1.5},
    "qwen3, presence penalty": QWEN3 | {"presence_penalty": 1.5},
}
ATTENTION = {
    "prefill 4 x 256": [(256, 256)] * 4,
    "chunk of 32 after 1024, 8 requests": [(32, 1056)] * 8,
    "decode 64 x 320": [(1, 320)] * 64,
    "decode 1 x 160": [(1, 160)],
    "decode 1 x 2048": [(1, 2048)],
}


def least_seconds(candidates: dict[str, Callable[[], object]], clock: Callable[[], float]) -> dict[str, float]:
    least = dict.fromkeys(candidates, math.inf)
    for _ in range(ROUNDS):
        for name, run in candidates.items():
            started = clock()
            run()
            least[name] = min(least[name], clock() - started)
    return least


def bench_linear(shape: ModelShape, kind: str, rows: int, clock: Callable[[], float]) -> None:
    outputs, inputs = shape.linears()[kind]
    copies = max(1, WEIGHT_BYTES // (2 * outputs * inputs) // max(1, rows // 64))
    weights = [torch.randn(outputs, inputs).to(torch.bfloat16) for _ in range(copies)]
    library = load_library()
    ours = [name for name, code in VARIANTS.items() if library is not None and library.kvasir_linear_has(code)]
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    layers = {path: [make_weight(weight, path=path) for weight in weights] for path in ("torch", *ours)}

    def pass_of(path: str) -> Callable[[], object]:
        return lambda: [layer(x) is None for layer in layers[path]]

    least = least_seconds({path: pass_of(path) for path in layers}, clock)
    gigabytes, gigaflops = (copies * outputs * inputs * factor / 1e9 for factor in (2, 2 * rows))
    cells = " ".join(f"{path} {gigabytes / s:5.1f} GB/s {gigaflops / s:6.0f} GFLOP/s |" for path, s in least.items())
    print(f"{shape.name} {kind} {outputs}x{inputs} rows {rows}: {cells}", flush=True)


def bench_attention(shape: ModelShape, name: str, lengths: list[tuple[int, int]], clock: Callable[[], float]) -> None:
    block_size, blocks_each = 16, [-(-seq_len // 16) for _, seq_len in lengths]
    buffer = torch.randn(sum(blocks_each), 2, 2, block_size, shape.num_kv_heads, shape.head_dim).to(torch.bfloat16)
    order = torch.split(torch.randperm(sum(blocks_each)).to(torch.int32), blocks_each)
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).to(torch.int32)
    query_lens = np.array([query_len for query_len, _ in lengths], dtype=np.int32)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    nothing = torch.empty(0, dtype=torch.int64)
    inputs = StepInputs(
        token_ids=nothing,
        positions=nothing,
        query_starts=starts,
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        rows=torch.arange(len(lengths), dtype=torch.int32),
        groups=(GroupInputs(table, nothing),),
        lengths=StepLengths(query_lens, int((query_lens == 1).sum()), max(seq_len for _, seq_len in lengths)),
    )
    query = torch.randn(int(starts[-1]), shape.num_heads, shape.head_dim).to(torch.bfloat16)
    cache, scale = LayerCache(buffer[:, 1, 0], buffer[:, 1, 1], 0), shape.head_dim**-0.5
    step = CpuAttention().prepare(inputs)
    dense = [
        (
            query[:query_len].transpose(0, 1)[None],
            torch.randn(1, shape.num_kv_heads, seq_len, shape.head_dim).to(query.dtype),
        )
        for query_len, seq_len in lengths
    ]

    def ours() -> object:
        return step.attend(query, cache, scale=scale, window=None, softcap=None)

    def torch_without_pages() -> object:
        return [
            functional.scaled_dot_product_attention(
                q, kv, kv, is_causal=q.shape[2] == kv.shape[2], enable_gqa=True
            ).ndim
            for q, kv in dense
        ]

    least = least_seconds({"paged": ours, "torch on dense keys": torch_without_pages}, clock)
    gigabytes = sum(seq_len for _, seq_len in lengths) * shape.num_kv_heads * shape.head_dim * 4 / 1e9
    pairs = sum(query_len * (seq_len - query_len / 2) for query_len, seq_len in lengths)
    gigaflops = 4 * pairs * shape.num_heads * shape.head_dim / 1e9
    cells = " ".join(f"{way} {gigabytes / s:5.1f} GB/s {gigaflops / s:6.0f} GFLOP/s |" for way, s in least.items())
    print(f"{shape.name} attention, {name}: {cells}", flush=True)


def bench_sampling(shape: ModelShape, num_rows: int, clock: Callable[[], float]) -> None:
    """Beside the product with the head, which greedy decoding needs as well; after 256 prompt and 256 output tokens."""
    reference = reference_step_ops(drops_missing_drafts=True)
    logits = (torch.randn(num_rows, shape.vocab) * 3).to(torch.bfloat16)
    head = make_weight(torch.randn(shape.vocab, shape.hidden).to(torch.bfloat16), path="auto")
    hidden, after = torch.randn(num_rows, shape.hidden).to(torch.bfloat16), torch.full((num_rows,), 511)
    cells = [f"head {least_seconds({'head': lambda: head(hidden) is None}, clock)['head'] * 1e3:.2f}"]
    for name, params in SAMPLINGS.items():
        rows, positions = sampled_rows(shape.vocab, num_rows, params)
        ways = {"ours": partial(draw, logits, rows, positions, after, cpu_step_ops())}
        ways["torch"] = partial(draw, logits, rows, positions, after, reference)
        least = least_seconds(ways, clock)
        cells.append(f"{name} {least['ours'] * 1e3:.2f} ({least['torch'] * 1e3:.1f})")
    print(f"{shape.name} sampling, rows {num_rows}, ms (torch): {' | '.join(cells)}", flush=True)


def sampled_rows(vocab_size: int, num_rows: int, params: dict[str, Any]) -> tuple[Rows, SampledPositions]:
    """Sequences of random tokens, and a decode step of all."""
    transfers = Transfers(torch.device("cpu"))
    rows = Rows(
        max_num_seqs=num_rows, max_model_len=512, block_size=16, num_groups=1, max_drafts=0, vocab_size=vocab_size,
        transfers=transfers,
    )  # fmt: skip
    rows.token_ids[:] = torch.randint(vocab_size, rows.token_ids.shape)
    rows.num_prompt_tokens[:] = 256
    rows.sampling.write(range(num_rows), [SamplingParams(max_tokens=1, seed=0, **params)] * num_rows)
    ones = np.ones(num_rows, dtype=np.int32)
    plan = StepPlan(
        number=0, added=(), forks=(), table_writes=np.empty((0, 4), np.int32), token_writes=np.empty((0, 3), np.int32),
        block_copies=np.empty((0, 2), np.int32), rows=np.arange(num_rows, dtype=np.int32), num_decodes=num_rows,
        num_new_tokens=ones, starts=511 * ones, samples=ones > 0,
    )  # fmt: skip
    return rows, SampledPositionsBuilder(rows, transfers).build(plan, ones)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=KERNELS, default=KERNELS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(f"threads {arguments.threads}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for shape in SHAPES:
        for num_rows in (1, 16, 64) if "sampling" in arguments.only else ():
            with torch.inference_mode():
                bench_sampling(shape, num_rows, clock)
        for name, lengths in ATTENTION.items() if "attention" in arguments.only else ():
            bench_attention(shape, name, lengths, clock)
        for kind in shape.linears() if "linear" in arguments.only else ():
            for rows in (1, 8, 32, 64) if kind == "head" else (1, 8, 32, 64, 256, 1024):
                bench_linear(shape, kind, rows, clock)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
