"""Decode steps of a CPU that are replayed compute, bit for bit, what they compute kernel by kernel."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.watched_platform import WatchedPlatform
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, StepInputs
from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.captures import CapturedGraph
from kvasir_runtime.execution.graphs import STEPS_BEFORE_RECORDING, GraphShape
from kvasir_runtime.execution.model_runner import ModelRunner
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.speculative.proposer import Proposer, ProposerSetup, VerifiedStep

AT_START = GraphShape(1, 1)
"""What the warm-up computes often enough."""
PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13])
TABLE = [(row, 0, index, 1 + 8 * row + index) for row in range(4) for index in range(8)]


@pytest.fixture
def make_runner(folder: Path) -> Callable[..., ModelRunner]:
    def make(
        dtype: str = "bfloat16",
        platform: WatchedPlatform | None = None,
        proposer: Proposer | None = None,
        **config: Any,
    ) -> ModelRunner:
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
            platform=platform,
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
    without, platform = WatchedPlatform(graph_bytes=0), WatchedPlatform()
    eager = make_runner(dtype, without, tie_word_embeddings=tied)
    runner = make_runner(dtype, platform, tie_word_embeddings=tied)
    assert tokens_of(runner) == tokens_of(eager)
    assert torch.equal(runner.kv_buffer, eager.kv_buffer)
    assert (without.shapes, platform.shapes) == ([], [AT_START, GraphShape(2, 1), GraphShape(3, 1)])


def test_all_kernels_of_a_step_are_one_call(make_runner: Any, tokens_of: Any) -> None:
    platform = WatchedPlatform()
    tokens_of(make_runner(platform=platform))
    step = dict(platform.captured)[GraphShape(3, 1)]
    assert isinstance(step, CapturedGraph)
    assert len(step.calls) == 1


def test_results_say_which_steps_warmed_up(make_runner: Any, make_plan: Any, new_sequence: Any) -> None:
    """Of three requests, since starting has computed steps of one and of two."""
    runner, rows = make_runner(), range(len(PROMPTS))
    added = [new_sequence(row, PROMPTS[row]) for row in rows]
    runner.forward(make_plan(chunks=[(row, 0, len(PROMPTS[row]), True) for row in rows], added=added, tables=TABLE))
    assert not runner.sample().result().times.is_warming_up
    told = []
    for number in range(STEPS_BEFORE_RECORDING + 1):
        starts = [len(prompt) + number for prompt in PROMPTS]
        runner.forward(make_plan(decodes=[(row, 1) for row in rows], starts=starts))
        told.append(runner.sample().result().times.is_warming_up)
    assert told == [True] * STEPS_BEFORE_RECORDING + [False]


class CapturingProposer:
    """Never guesses; keeps what it is shown of the stream that enters the first layer."""

    name = "capturing"
    wants_hidden = False
    captured_layers = (0,)
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
    proposers, platforms = [CapturingProposer() for _ in range(2)], [WatchedPlatform(graph_bytes=0), WatchedPlatform()]
    runners = [make_runner(proposer=each, platform=own) for each, own in zip(proposers, platforms, strict=True)]
    for runner, proposer in zip(runners, proposers, strict=True):
        proposer.shown.clear()
        runner.forward(make_plan(chunks=[(0, 0, 3, True)], added=[new_sequence(0, PROMPTS[0])], tables=TABLE))
        runner.sample().result()
        for number in range(4 * STEPS_BEFORE_RECORDING):
            runner.forward(make_plan(decodes=[(0, 1)], starts=[3 + number], proposals=number % 2))
            runner.sample().result()
    of_single = [step for shape, step in platforms[1].captured if shape == GraphShape(1, 1)]
    assert all(isinstance(step, CapturedGraph) for step in of_single)
    assert sorted(len(step.output.captured) for step in of_single) == [0, 1]
    assert len(proposers[1].shown) == 2 * STEPS_BEFORE_RECORDING
    assert torch.equal(torch.cat(proposers[1].shown), torch.cat(proposers[0].shown))


def test_shapes_that_did_not_come_up_are_not_captured(make_runner: Any, tokens_of: Any) -> None:
    platform = WatchedPlatform()
    runner = make_runner(platform=platform)
    while runner.use_idle_time():
        assert platform.shapes == [AT_START]
    assert platform.shapes == [AT_START]


class PlainAttention(CpuAttention):
    """The reference, which looks at lengths on the host."""

    def prepare(self, inputs: StepInputs) -> AttentionStep:
        return ReferenceAttention().prepare(inputs)


def test_a_computation_that_reads_numbers_runs_kernel_by_kernel(make_runner: Any, tokens_of: Any) -> None:
    eager = tokens_of(make_runner(platform=WatchedPlatform(graph_bytes=0)))
    platform = WatchedPlatform(backend=lambda *choice: PlainAttention())
    assert len(tokens_of(make_runner(platform=platform))) == len(eager)
    assert platform.captured == []
    assert platform.attempts == [AT_START], "it is not tried again"


def test_memory_bounds_what_is_recorded(make_runner: Any, tokens_of: Any) -> None:
    platform = WatchedPlatform(graph_bytes=1)
    tokens_of(make_runner(platform=platform))
    assert platform.shapes == [AT_START]
