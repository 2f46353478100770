"""Decode step time on one GPU beside its byte floor: random weights made on the device, eager and with CUDA graphs.

Every sequence holds CONTEXT tokens and decodes greedily through the step contract, as the engine does; results are read
one step late. The floor is the time to read each weight and each key and value once, as fast as a large copy on the
same device reads and writes. Prints a Markdown table and writes it to benchmarks/results/.

    PYTHONPATH=runtime python benchmarks/gpu_decode.py [--profile FILE.json.gz]
    PYTHONPATH=runtime TRITON_INTERPRET=1 python benchmarks/gpu_decode.py --toy    # seconds, on a CPU: that it runs
"""

import argparse
import datetime
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, profiler

from kvasir_runtime.attention.backend import DecodeBounds
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.execution.captures import CudaGraphCapture, ToCapture
from kvasir_runtime.execution.graphs import Capture, CaptureError, DecodeGraphs, GraphMemory, GraphShape
from kvasir_runtime.execution.kv_buffer import allocate_kv_buffer, layer_caches
from kvasir_runtime.execution.model_runner import EagerDecoder, ModelRunner
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.ops_triton import triton_ops, triton_step_ops
from kvasir_runtime.kv_cache.spec import make_layout
from kvasir_runtime.models.checkpoint import Checkpoint, Shard
from kvasir_runtime.models.decoder import ComputeStep
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import NewSequence, StepPlan

BLOCK_SIZE = 16
GRAPH_BYTES = 4 * 2**30
NUM_COPIES = 200  # a GPU that was idle takes a tenth of a second to reach its clocks
PROFILED_STEPS = 10

MakeCapture = Callable[[ComputeStep, Tensor, int], Capture]
"""Of a computation over block tables, of sequences of so many tokens at most."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
CONFIGS = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "hidden_act": "silu", "max_position_embeddings": 8192, "attention_bias": False, "tie_word_embeddings": True,
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
    "Llama-3.1-8B": _LLAMA | {
        "tie_word_embeddings": False, "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    },
}  # fmt: skip
TOY = _LLAMA | {
    "tie_word_embeddings": False, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    batch_sizes: tuple[int, ...]
    context: int
    num_steps: int

    @property
    def max_model_len(self) -> int:
        return self.context + 2 * self.num_steps


@dataclass(frozen=True)
class Row:
    model: str
    batch_size: int
    floor_seconds: float
    eager_seconds: float
    graph_seconds: float | None


class RandomCheckpoint(Checkpoint):
    """Whatever tensor is asked for, made on the device; the norms' weights are 1."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(Path("random"))
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self.num_bytes: dict[str, int] = {}

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None = None, rows: range | None = None) -> Tensor:
        shape = shape if rows is None else (len(rows), *shape[1:])
        tensor = torch.ones(shape, dtype=self._dtype, device=self._device)
        if len(shape) > 1:
            tensor.normal_(0.0, 0.02, generator=self._generator)
        self.num_bytes[name] = tensor.nbytes
        return tensor

    def read_bytes(self, is_tied: bool) -> int:
        """Read by a decode step: all but an embedding that is only looked up."""
        looked_up = 0 if is_tied else self.num_bytes["model.embed_tokens.weight"]
        return sum(self.num_bytes.values()) - looked_up


class Bench:
    """One model on one device, ready to decode up to the largest batch."""

    def __init__(self, config: dict[str, object], workload: Workload, device: torch.device, dtype: torch.dtype) -> None:
        options = read_options(HuggingFaceConfig(Path("config.json"), config))
        checkpoint = RandomCheckpoint(device, dtype)
        placement = Placement(device=device, dtype=dtype, ops=triton_ops())
        self.workload, self.device, self.vocab_size = workload, device, options.vocab_size
        self.decoder = load_decoder(checkpoint, options, placement, workload.max_model_len)
        self.weight_bytes = checkpoint.read_bytes(options.tie_word_embeddings)
        self.specs = self.decoder.kv_specs(dtype)
        self.max_num_seqs = max(workload.batch_sizes)

    def floor_bytes(self, batch_size: int) -> int:
        """That a step must read."""
        return self.weight_bytes + batch_size * self.workload.context * sum(spec.token_bytes for spec in self.specs)

    def step_seconds(self, batch_size: int, make_capture: MakeCapture | None = None) -> float:
        """Mean over the steps, of which the first ones are not timed; on graphs where they can be captured. Raises
        CaptureError."""
        runner, plans = self._warmed_up(batch_size, make_capture)
        start = time.perf_counter()
        run(runner, plans)
        return (time.perf_counter() - start) / len(plans)

    def profile(self, batch_size: int, make_capture: MakeCapture | None, trace: Path) -> str:
        """Kernels by the time that they take in PROFILED_STEPS steps; the trace is one for Chrome or Perfetto."""
        runner, plans = self._warmed_up(batch_size, make_capture)
        with profiler.profile() as profiled:
            run(runner, plans[:PROFILED_STEPS])
        profiled.export_chrome_trace(str(trace))
        averages = profiled.key_averages()
        return str(
            averages.table(sort_by=f"self_{self.device.type}_time_total", row_limit=40, max_name_column_width=60)
        )

    def _warmed_up(self, batch_size: int, make_capture: MakeCapture | None) -> tuple[ModelRunner, list[StepPlan]]:
        """A runner that has done its first steps, and those to come. Raises CaptureError."""
        runner, plans = self._runner(batch_size, make_capture), self._steps(batch_size)
        for plan in plans[: self.workload.num_steps]:
            runner.forward(plan)
            runner.sample().result()
        return runner, plans[self.workload.num_steps :]

    def _runner(self, batch_size: int, make_capture: MakeCapture | None) -> ModelRunner:
        layout = make_layout(self.specs, BLOCK_SIZE)
        transfers = Transfers(self.device)
        rows = Rows(
            max_num_seqs=self.max_num_seqs, max_model_len=self.workload.max_model_len, block_size=BLOCK_SIZE,
            num_groups=len(layout.groups), max_drafts=0, vocab_size=self.vocab_size, transfers=transfers,
        )  # fmt: skip
        buffer = allocate_kv_buffer(layout, batch_size * self._blocks_each, self.device).zero_()
        backend = TritonAttention(self.device, DecodeBounds(self.max_num_seqs, 1))
        compute: ComputeStep = EagerDecoder(self.decoder, backend, layer_caches(layout, self.specs, buffer), ())
        if make_capture is not None:
            capture = make_capture(compute, rows.block_tables, self.workload.max_model_len)
            compute = graphs = DecodeGraphs(compute, capture, [batch_size], [1], GraphMemory(GRAPH_BYTES))
            graphs.capture_next()
            if graphs.captured != [GraphShape(batch_size, 1)]:
                raise CaptureError(f"no graph of {batch_size} requests to time; the log says why")
        return ModelRunner(
            rows=rows, buffer=buffer, compute=compute, to_logits=self.decoder.logits, ops=triton_step_ops(),
            proposer=None, max_num_batched_tokens=self.max_num_seqs, transfers=transfers,
        )  # fmt: skip

    @property
    def _blocks_each(self) -> int:
        return -(-self.workload.max_model_len // BLOCK_SIZE)

    def _steps(self, batch_size: int) -> list[StepPlan]:
        """Sequences that know CONTEXT tokens, and one decode after the other."""
        context, num_blocks = self.workload.context, self._blocks_each
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        spec = RequestSpec(prompt_token_ids=[1] * context, sampling=sampling)
        added = tuple(NewSequence(row, spec, [], context - 1) for row in range(batch_size))
        block = np.arange(batch_size * num_blocks)
        tables = np.stack([block // num_blocks, 0 * block, block % num_blocks, block], axis=1).astype(np.int32)
        return [
            StepPlan(
                number=number,
                added=added if number == 0 else (),
                forks=(),
                table_writes=tables if number == 0 else tables[:0],
                token_writes=np.empty((0, 3), dtype=np.int32),
                block_copies=np.empty((0, 2), dtype=np.int32),
                rows=np.arange(batch_size, dtype=np.int32),
                num_decodes=batch_size,
                num_new_tokens=np.ones(batch_size, dtype=np.int32),
                starts=np.full(batch_size, context - 1 + number, dtype=np.int32),
                samples=np.ones(batch_size, dtype=np.bool_),
            )
            for number in range(2 * self.workload.num_steps)
        ]


def run(runner: ModelRunner, plans: list[StepPlan]) -> None:
    """Each result is read one step late."""
    pending = None
    for plan in plans:
        runner.forward(plan)
        last, pending = pending, runner.sample()
        if last is not None:
            last.result()
    assert pending is not None
    pending.result()


def copied_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Read and written, by the fastest of some copies."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(NUM_COPIES):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / min(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    name: str,
    config: dict[str, object],
    workload: Workload,
    device: torch.device,
    bytes_per_second: float,
    make_capture: MakeCapture | None,
) -> list[Row]:
    """`make_capture`: None where there are no graphs."""
    bench = Bench(config, workload, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return [
        Row(
            name,
            batch_size,
            bench.floor_bytes(batch_size) / bytes_per_second,
            bench.step_seconds(batch_size),
            None if make_capture is None else bench.step_seconds(batch_size, make_capture),
        )
        for batch_size in workload.batch_sizes
    ]


def capture_on_cuda(compute: ComputeStep, block_tables: Tensor, max_seq_len: int) -> Capture:
    what = ToCapture(compute, block_tables, max_seq_len, load_inputs=triton_step_ops().load_inputs)
    return CudaGraphCapture(what)


def table(rows: Iterable[Row], machine: str, bytes_per_second: float, context: int) -> str:
    lines = [
        f"Decode step on {machine}, {context} tokens of context, greedy, bfloat16 on a GPU; milliseconds. A large copy "
        f"reads and writes {bytes_per_second / 1e12:.2f} TB/s.",
        "",
        "| model | batch | floor | eager | graphs | graphs / floor |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        graph = "-" if row.graph_seconds is None else f"{row.graph_seconds * 1e3:.2f}"
        ratio = "-" if row.graph_seconds is None else f"{row.graph_seconds / row.floor_seconds:.2f}"
        lines.append(
            f"| {row.model} | {row.batch_size} | {row.floor_seconds * 1e3:.2f} | {row.eager_seconds * 1e3:.2f} "
            f"| {graph} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="one tiny layer; under Triton's interpreter on a CPU")
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100, help="timed; as many run before")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="of the first model's steps of one sequence, a trace"
    )
    arguments = parser.parse_args(argv)
    if arguments.toy:
        workload = Workload((1, 2), context=20, num_steps=1)
        device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
        make_capture = capture_on_cuda if device.type == "cuda" else None
        bytes_per_second = copied_bytes_per_second(device, 2**20)
        rows = measure("toy", TOY, workload, device, bytes_per_second, make_capture)
        if arguments.profile is not None:
            print(Bench(TOY, workload, device, torch.float32).profile(1, make_capture, arguments.profile))
        print(table(rows, device.type, bytes_per_second, workload.context))
        return
    workload = Workload((1, 8, 64), arguments.context, arguments.steps)
    device = torch.device("cuda")
    bytes_per_second = copied_bytes_per_second(device, 2**32)
    rows = [
        row
        for name in arguments.models
        for row in measure(name, CONFIGS[name], workload, device, bytes_per_second, capture_on_cuda)
    ]
    text = table(rows, torch.cuda.get_device_name(device), bytes_per_second, workload.context)
    command = (
        f"PYTHONPATH=runtime python benchmarks/gpu_decode.py --context {workload.context} --steps {arguments.steps}"
    )
    print(text)
    path = arguments.results / f"gpu_decode-{datetime.date.today():%Y-%m-%d}.md"
    path.write_text(f"{text}\n`{command}`, torch {torch.__version__}\n")
    if arguments.profile is not None:
        bench = Bench(CONFIGS[arguments.models[0]], workload, device, torch.bfloat16)
        print(bench.profile(1, capture_on_cuda, arguments.profile))


if __name__ == "__main__":
    main()
