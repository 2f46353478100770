"""What the largest steps take is found by running them, and is still free when they run over a full KV cache."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.execution.device import memory_limit_bytes, resident_bytes
from kvasir_runtime.execution.graphs import DecodeGraphs, GraphMemory, GraphShape, graph_sizes
from kvasir_runtime.execution.kv_buffer import DeviceMemory, SequenceLimits
from kvasir_runtime.execution.memory_profile import LEAST_GRAPH_BYTES, RECORDING_BYTES, measure_memory
from kvasir_runtime.execution.synthetic_steps import DEMANDING, decode_step, prefill_step, run
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.models.decoder import DecoderOutput
from kvasir_runtime.requests.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from kvasir_runtime.scheduling.step import StepPlan

MIB = 2**20
TOTAL, FREE, ROWS_BYTES = 80_000 * MIB, 70_000 * MIB, 5_000
LARGE = LEAST_GRAPH_BYTES + 7
LIMITS = SequenceLimits(max_num_seqs=4, max_model_len=16, max_num_batched_tokens=40)


@dataclass
class FakeGpu:
    """A device of TOTAL bytes, whose allocator is asked through torch.cuda."""

    allocated: int = 200_000
    peak: int = 0

    def take_for_a_moment(self, num_bytes: int) -> None:
        self.peak = max(self.peak, self.allocated + num_bytes)

    def reset_peak(self) -> None:
        self.peak = self.allocated


@dataclass
class FakeRunner:
    """Takes so many bytes while a step of prompts runs, and so many for one of decodes."""

    gpu: FakeGpu
    prefill_bytes: int
    decode_bytes: int
    kept_bytes: int = 0
    """By its rows, from the first step on."""
    draft_bytes: int = 0
    """For each draft of a sequence, besides."""
    plans: list[StepPlan] = field(default_factory=list)

    def forward(self, plan: StepPlan) -> None:
        self.gpu.allocated += 0 if self.plans else self.kept_bytes
        self.plans.append(plan)
        decode_bytes = self.decode_bytes + self.draft_bytes * (int(plan.num_new_tokens[0]) - 1)
        self.gpu.take_for_a_moment(decode_bytes if plan.num_decodes else self.prefill_bytes)

    def sample(self) -> "FakeRunner":
        return self

    def result(self) -> None:
        """There is nothing to wait for."""

    def use_idle_time(self) -> bool:
        return False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    for name, replacement in {
        "mem_get_info": lambda device: (FREE, TOTAL),
        "memory_allocated": lambda: fake.allocated,
        "max_memory_allocated": lambda: fake.peak,
        "reset_peak_memory_stats": fake.reset_peak,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return fake


def profile(gpu: FakeGpu, runner: FakeRunner, max_drafts: int = 0, limits: SequenceLimits = LIMITS) -> DeviceMemory:
    def make_runner(num_blocks: int) -> FakeRunner:
        assert num_blocks == 1
        gpu.allocated += ROWS_BYTES
        return runner

    return measure_memory(torch.device("cuda"), make_runner, limits, max_drafts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prefill_bytes", "decode_bytes"), [(2 * LARGE, LARGE), (0, LARGE), (90_000, 30_000), (0, 0)])
def test_the_larger_step_the_rows_and_once_more_the_decode_for_graphs_count_as_used(
    gpu: FakeGpu, prefill_bytes: int, decode_bytes: int
) -> None:
    memory = profile(gpu, FakeRunner(gpu, prefill_bytes, decode_bytes))
    graph_bytes = max(decode_bytes, LEAST_GRAPH_BYTES)
    used = TOTAL - FREE + ROWS_BYTES + max(prefill_bytes, decode_bytes) + graph_bytes
    assert memory == DeviceMemory("cuda", TOTAL, used, graph_bytes)


def test_what_a_step_leaves_in_the_rows_counts_whichever_step_is_larger(gpu: FakeGpu) -> None:
    plain = profile(gpu, FakeRunner(gpu, 30_000, 90_000))
    assert profile(gpu, FakeRunner(gpu, 30_000, 90_000, kept_bytes=7_000)).used_bytes == plain.used_bytes + 7_000


@pytest.mark.parametrize("max_num_seqs", [1, 4, 8, 256])
def test_the_graphs_of_every_batch_size_fit_into_their_memory(gpu: FakeGpu, max_num_seqs: int) -> None:
    """Llama 8B: a decode takes 3.2 MiB a sequence, and the first capture a workspace of 32 MiB besides."""
    runner = FakeRunner(gpu, 0, max_num_seqs * 3_200_000)
    memory = profile(gpu, runner, limits=replace(LIMITS, max_num_seqs=max_num_seqs, max_num_batched_tokens=4096))
    captured: list[int] = []

    def capture(shape: GraphShape) -> Graph:
        captured.append(shape.num_requests)
        return Graph(34 * MIB if len(captured) == 1 else shape.num_requests * 100_000)

    graphs = DecodeGraphs(never_run, capture, graph_sizes(max_num_seqs), [1], GraphMemory(memory.graph_bytes))
    while graphs.capture_next():
        pass
    assert captured == graph_sizes(max_num_seqs)


@dataclass(frozen=True)
class Graph:
    memory_bytes: int

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        return never_run(inputs, None)


def never_run(inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
    raise AssertionError("graphs are captured, not run")


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_the_steps_that_run_are_the_largest_there_can_be(gpu: FakeGpu, max_drafts: int) -> None:
    runner = FakeRunner(gpu, 1, 1)
    profile(gpu, runner, max_drafts)
    prefill, decode = runner.plans
    assert prefill.num_new_tokens.tolist() == [16, 16, 8]
    assert decode.num_new_tokens.tolist() == [1 + max_drafts] * LIMITS.max_num_seqs
    assert decode.num_decodes == LIMITS.max_num_seqs
    assert (decode.starts + decode.num_new_tokens).tolist() == [LIMITS.max_model_len] * LIMITS.max_num_seqs
    for plan in (prefill, decode):
        assert plan.samples.all()
        assert plan.num_proposals == max_drafts
        assert all(new.spec.sampling == DEMANDING for new in plan.added)
    assert (len(DEMANDING.logit_bias), len(DEMANDING.stop_token_ids)) == (MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS)
    assert DEMANDING.min_tokens > 0


@pytest.mark.parametrize(
    ("budget", "max_drafts", "decodes"),
    [
        (20, 4, [[5, 5, 5, 5]]),
        (19, 4, [[4, 4, 4, 4], [5, 5, 5]]),
        (7, 4, [[1, 1, 1, 1], [5]]),
        (4, 4, [[1, 1, 1, 1]]),
    ],
)
def test_no_step_of_decodes_has_more_tokens_than_a_step_may_have(
    gpu: FakeGpu, budget: int, max_drafts: int, decodes: list[list[int]]
) -> None:
    """All sequences with what drafts there is room for, and as many as there is room for with all of theirs."""
    runner = FakeRunner(gpu, 1, LARGE, draft_bytes=10)
    memory = profile(gpu, runner, max_drafts, replace(LIMITS, max_num_batched_tokens=budget))
    assert memory.graph_bytes == LARGE + 10 * (decodes[-1][0] - 1), "what the larger of them takes"
    _, *steps = runner.plans
    assert [step.num_new_tokens.tolist() for step in steps] == decodes
    assert all(step.num_tokens <= budget for step in runner.plans)
    assert all(step.num_proposals == max_drafts for step in steps), "whose proposer runs, whatever is verified"


def test_on_a_cpu_nothing_runs_and_the_ranks_of_a_node_share_its_memory() -> None:
    def make_runner(num_blocks: int) -> FakeRunner:
        raise AssertionError("no step is needed")

    alone, shared = (measure_memory(torch.device("cpu"), make_runner, LIMITS, 0, num_sharers=n) for n in (1, 3))
    assert (alone.device_type, alone.limit_bytes, alone.graph_bytes) == ("cpu", memory_limit_bytes(), RECORDING_BYTES)
    assert shared.limit_bytes == alone.limit_bytes // 3
    assert alone.used_bytes - RECORDING_BYTES == pytest.approx(resident_bytes(), rel=0.1)


@pytest.mark.gpu
def test_the_largest_steps_and_captures_keep_within_the_share_of_a_gpu(folder: Path) -> None:
    """The prefill's temporaries are some GB: more than the context, which torch does not count, could hide."""
    widen_mlp(folder, 8192)
    limits = SequenceLimits(max_num_seqs=256, max_model_len=64, max_num_batched_tokens=16_384)
    share = 0.25
    worker = load_worker(
        ModelConfig(model=str(folder), device="cuda"),
        CacheConfig(gpu_memory_utilization=share),
        ExecutionConfig(num_threads=1),
        SchedulerConfig(max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens),
    )
    torch.cuda.reset_peak_memory_stats()
    run(worker.runner, prefill_step([limits.max_model_len] * limits.max_num_seqs, DEMANDING, 0))
    run(worker.runner, decode_step(limits.max_num_seqs, 0, limits.max_model_len, DEMANDING))
    while worker.runner.use_idle_time():
        pass
    _, total = torch.cuda.mem_get_info()
    assert torch.cuda.max_memory_allocated() <= share * total


def widen_mlp(folder: Path, size: int) -> None:
    """Make the checkpoint's MLP so wide that a step's temporaries are large and its weights are not."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        shape = tuple(size if length == 48 else length for length in tensors[name].shape)
        tensors[name] = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": size}))
