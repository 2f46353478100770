"""Decode steps of a CPU that are replayed compute, bit for bit, what they compute kernel by kernel."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir_runtime.attention import cpu as attention
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution import memory_profile
from kvasir_runtime.execution.captured_graph import CapturedGraph
from kvasir_runtime.execution.graphs import STEPS_BEFORE_RECORDING, DecodeGraphs, GraphShape
from kvasir_runtime.execution.model_runner import EagerDecoder, ModelRunner
from kvasir_runtime.execution.runner_assembly import ByCaptures
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.kernels.recording import Recording
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.speculative.proposer import Proposer, ProposerSetup, VerifiedStep

AT_START = GraphShape(1, 1)
"""What the warm-up computes often enough."""
PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13])
TABLE = [(row, 0, index, 1 + 8 * row + index) for row in range(4) for index in range(8)]


@pytest.fixture
def make_runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelRunner]:
    def make(
        dtype: str = "bfloat16", recording_bytes: int = 1 << 26, proposer: Proposer | None = None, **config: Any
    ) -> ModelRunner:
        monkeypatch.setattr(memory_profile, "RECORDING_BYTES", recording_bytes)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        execution = ExecutionConfig(
            num_threads=1,
            linear_path="fma" if dtype == "bfloat16" else "auto",
            speculative_config=None if proposer is None else SpeculativeConfig(method="ngram"),
        )
        runner = load_worker(
            ModelConfig(model=str(folder), device="cpu", dtype=dtype),
            CacheConfig(block_size=8, num_gpu_blocks_override=40),
            execution,
            SchedulerConfig(max_num_seqs=4),
            None if proposer is None else lambda *parts: proposer,
        ).runner
        assert isinstance(runner, ModelRunner)
        runner.kv_buffer.zero_()
        return runner

    return make


@pytest.fixture
def tokens_of(make_plan: Any, new_sequence: Any) -> Callable[[ModelRunner], list[list[int]]]:
    """Three sequences decode together, then the last two, then one beside a prompt's chunk, then all three."""

    def generate(runner: ModelRunner) -> list[list[int]]:
        known = [list(prompt) for prompt in PROMPTS]

        def step(rows: list[int], **plan: Any) -> None:
            runner.forward(
                make_plan(decodes=[(row, 1) for row in rows], starts=[len(known[row]) - 1 for row in rows], **plan)
            )
            result = runner.sample().result()
            for row, token in zip(rows, result.token_ids[:, 0].tolist(), strict=False):
                known[row].append(token)

        added = [new_sequence(row, prompt) for row, prompt in enumerate(PROMPTS)]
        runner.forward(
            make_plan(
                chunks=[(row, 0, len(prompt), True) for row, prompt in enumerate(PROMPTS)], added=added, tables=TABLE
            )
        )
        for tokens, token in zip(known, runner.sample().result().token_ids[:, 0].tolist(), strict=True):
            tokens.append(token)
        for _ in range(STEPS_BEFORE_RECORDING + 6):
            step([0, 1, 2])
        for _ in range(STEPS_BEFORE_RECORDING + 3):
            step([2, 1])
        step([2], chunks=[(3, 0, 2, False)], added=[new_sequence(3, [3, 4])])
        for _ in range(3):
            step([0, 1, 2])
        return known

    return generate


def graphs_of(runner: ModelRunner) -> DecodeGraphs:
    assert isinstance(runner._compute, DecodeGraphs)
    return runner._compute


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_replayed_steps_compute_the_same(
    dtype: str, tied: bool, folder: Path, make_runner: Any, tokens_of: Any
) -> None:
    if not tied:
        weights = load_file(folder / "model.safetensors")
        save_file(
            weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 0.5}, folder / "model.safetensors"
        )
    eager = make_runner(dtype, 0, tie_word_embeddings=tied)
    assert isinstance(eager._compute, EagerDecoder)
    runner = make_runner(dtype, tie_word_embeddings=tied)
    assert tokens_of(runner) == tokens_of(eager)
    assert torch.equal(runner.kv_buffer, eager.kv_buffer)
    assert graphs_of(runner).captured == [AT_START, GraphShape(2, 1), GraphShape(3, 1)]


def test_all_kernels_of_a_step_are_one_call(make_runner: Any, tokens_of: Any) -> None:
    runner = make_runner()
    tokens_of(runner)
    step = graphs_of(runner)._captured[GraphShape(3, 1)]
    assert isinstance(step, CapturedGraph)
    assert isinstance(step.graph, Recording)
    assert len(step.graph.calls) == 1


def test_results_say_which_steps_warmed_up(make_runner: Any, make_plan: Any, new_sequence: Any) -> None:
    runner = make_runner()
    added = [new_sequence(row, PROMPTS[row]) for row in range(2)]
    runner.forward(make_plan(chunks=[(0, 0, 3, True), (1, 0, 2, True)], added=added, tables=TABLE))
    assert not runner.sample().result().is_warming_up
    told = []
    for number in range(STEPS_BEFORE_RECORDING + 1):
        runner.forward(make_plan(decodes=[(0, 1), (1, 1)], starts=[3 + number, 2 + number]))
        told.append(runner.sample().result().is_warming_up)
    assert told == [True] * STEPS_BEFORE_RECORDING + [False]


class CapturingProposer:
    """Never guesses; keeps what it is shown of the stream that enters the first layer."""

    name = "capturing"
    wants_hidden = False
    captured_layers = (0,)
    is_catching_up = False
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def bind(self, setup: ProposerSetup) -> None:
        """Nothing of it is needed."""

    def propose(self, step: VerifiedStep) -> Tensor:
        self.shown += [layer.clone() for layer in step.captured]
        return torch.full((len(step.rows), step.num_proposals), -1, dtype=torch.int32)


def test_a_step_that_nobody_is_shown_captures_nothing_on_a_recording_either(
    make_runner: Any, make_plan: Any, new_sequence: Any
) -> None:
    proposers = [CapturingProposer() for _ in range(2)]
    runners = [
        make_runner(proposer=proposer, recording_bytes=number << 26) for number, proposer in enumerate(proposers)
    ]
    for runner, proposer in zip(runners, proposers, strict=True):
        proposer.shown.clear()
        runner.forward(make_plan(chunks=[(0, 0, 3, True)], added=[new_sequence(0, PROMPTS[0])], tables=TABLE))
        runner.sample().result()
        for number in range(4 * STEPS_BEFORE_RECORDING):
            runner.forward(make_plan(decodes=[(0, 1)], starts=[3 + number], proposals=number % 2))
            runner.sample().result()
    compute = runners[1]._compute
    assert isinstance(compute, ByCaptures)
    plain, capturing = (graphs._captured[GraphShape(1, 1)] for graphs in (compute.plain, compute.capturing))
    assert (len(plain.output.captured), len(capturing.output.captured)) == (0, 1)
    assert len(proposers[1].shown) == 2 * STEPS_BEFORE_RECORDING
    assert torch.equal(torch.cat(proposers[1].shown), torch.cat(proposers[0].shown))


def test_shapes_that_did_not_come_up_are_not_captured(make_runner: Any, tokens_of: Any) -> None:
    runner = make_runner()
    while runner.use_idle_time():
        assert graphs_of(runner).captured == [AT_START]
    assert graphs_of(runner).captured == [AT_START]


def test_a_computation_that_reads_numbers_runs_kernel_by_kernel(
    make_runner: Any, tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference attention looks at lengths on the host."""
    eager = tokens_of(make_runner(recording_bytes=0))
    monkeypatch.setattr(attention, "plan_problem", lambda *tensors: "a test says so")
    runner = make_runner()
    graphs = graphs_of(runner)
    assert len(tokens_of(runner)) == len(eager)
    assert graphs.captured == []
    assert not graphs._wanted, "it is not tried again"


def test_memory_bounds_what_is_recorded(make_runner: Any, tokens_of: Any) -> None:
    runner = make_runner(recording_bytes=1)
    tokens_of(runner)
    assert graphs_of(runner).captured == [AT_START]
