"""One layer's mixture of experts in bf16: ours, its plain twin, and Hugging Face's transformers, at equal weights.

Shapes are those of Mixtral 8x7B and Qwen3-30B-A3B with narrower experts, so that a layer fits this machine; numbers of
experts and experts a token are theirs. Every pass brings other tokens, so that weights come from memory as in a model.
Candidates take turns and the median of each counts. With one thread it is processor time, which other load on the
machine hardly touches; with more it is wall time, so look at the load that is printed before believing a ratio.

    PYTHONPATH=runtime python benchmarks/experts.py [--threads 1] [--rounds 9]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kvasir_runtime.kernels.grouped_linear import make_grouped_weight
from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kernels.ops import Ops, cpu_ops, reference_ops
from kvasir_runtime.models.mixture_of_experts import MixtureOfExperts
from kvasir_runtime.models.options import GatedMlpOptions, MoeOptions
from kvasir_runtime.parallel.collectives import SingleRank

ROWS = (1, 8, 64, 512)
Block = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    @property
    def options(self) -> MoeOptions:
        expert = GatedMlpOptions(intermediate_size=self.intermediate, activation="silu", bias=False)
        return MoeOptions(num_experts=self.num_experts, top_k=self.top_k, renormalises=True, expert=expert, shared=None)


SHAPES = (
    Shape("mixtral-like", hidden=1024, intermediate=3584, num_experts=8, top_k=2),
    Shape("qwen3-moe-like", hidden=1024, intermediate=384, num_experts=128, top_k=8),
)
TOY = Shape("toy", hidden=64, intermediate=32, num_experts=4, top_k=2)


@dataclass(frozen=True)
class Weights:
    router: Tensor  # [num_experts, hidden]
    gate_up: Tensor  # [num_experts, 2 * intermediate, hidden]
    down: Tensor  # [num_experts, hidden, intermediate]


def random_weights(shape: Shape) -> Weights:
    random = torch.Generator().manual_seed(0)

    def weight(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random).mul_(sizes[-1] ** -0.5).bfloat16()

    return Weights(
        weight(shape.num_experts, shape.hidden),
        weight(shape.num_experts, 2 * shape.intermediate, shape.hidden),
        weight(shape.num_experts, shape.hidden, shape.intermediate),
    )


def our_block(shape: Shape, weights: Weights, ops: Ops, path: str) -> MixtureOfExperts:
    def own(tensor: Tensor) -> Iterator[Tensor]:
        return (expert.clone() for expert in tensor)

    return MixtureOfExperts(
        options=shape.options,
        router=make_weight(weights.router.clone(), path=path),
        gate_up=make_grouped_weight(own(weights.gate_up), shape.num_experts, path),
        down=make_grouped_weight(own(weights.down), shape.num_experts, path),
        local=range(shape.num_experts),
        shared=None,
        activate_and_mul=ops.silu_and_mul,
        ops=ops,
        tensor=SingleRank(),
    )


def hugging_face_block(shape: Shape, weights: Weights) -> Block:
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_experts_per_tok": shape.top_k,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    if shape.num_experts <= 8:
        config = transformers.MixtralConfig(
            num_local_experts=shape.num_experts, intermediate_size=shape.intermediate, **sizes
        )
        block: torch.nn.Module = MixtralSparseMoeBlock(config)
    else:
        config = transformers.Qwen3MoeConfig(
            num_experts=shape.num_experts, moe_intermediate_size=shape.intermediate, norm_topk_prob=True, **sizes
        )
        block = Qwen3MoeSparseMoeBlock(config)
    config._experts_implementation = "grouped_mm"  # what transformers chooses where torch has it
    block = block.bfloat16()
    block.gate.weight.data = weights.router
    block.experts.gate_up_proj.data, block.experts.down_proj.data = weights.gate_up, weights.down
    return lambda hidden: block(hidden[None])[0]


def median_seconds(blocks: dict[str, Block], inputs: list[Tensor], clock: Callable[[], float]) -> dict[str, float]:
    """Of one pass over one of the inputs, which take turns too."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for hidden in inputs:
        for name, block in blocks.items():
            started = clock()
            block(hidden)
            seconds[name].append(clock() - started)
    return {name: statistics.median(of) for name, of in seconds.items()}


@torch.inference_mode()
def bench(shape: Shape, rows: tuple[int, ...], rounds: int, clock: Callable[[], float]) -> Iterator[str]:
    """Rows of the table."""
    weights = random_weights(shape)
    blocks: dict[str, Block] = {
        "ours": our_block(shape, weights, cpu_ops(), "auto"),
        "twin": our_block(shape, weights, reference_ops(), "torch"),
        "transformers": hugging_face_block(shape, weights),
    }
    random = torch.Generator().manual_seed(1)
    for num_tokens in rows:
        inputs = [torch.randn(num_tokens, shape.hidden, generator=random).bfloat16() for _ in range(rounds)]
        torch.testing.assert_close(blocks["ours"](inputs[0]), blocks["twin"](inputs[0]), atol=0.05, rtol=0.05)
        seconds = median_seconds(blocks, inputs, clock)
        cells = [f"{of * 1e3:.2f} | {num_tokens / of:,.0f}" for of in seconds.values()]
        ratios = [f"{seconds[name] / seconds['ours']:.2f}" for name in ("twin", "transformers")]
        yield " | ".join(("", shape.name, str(num_tokens), *cells, *ratios, "")).strip()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--toy", action="store_true", help="a tiny shape, to see that it runs")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(f"threads {arguments.threads}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(
        "| layer | tokens | ours, ms | tok/s | plain twin, ms | tok/s | transformers, ms | tok/s | twin / ours "
        "| transformers / ours |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for shape in (TOY,) if arguments.toy else SHAPES:
        for line in bench(shape, (1, 4) if arguments.toy else ROWS, arguments.rounds, clock):
            print(line, flush=True)
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
