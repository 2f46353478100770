"""The engine core as its configuration and the loaded rank make it: what reaches the loop and the scheduler."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvasir_runtime.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kvasir_runtime.engine.core import EngineCore
from kvasir_runtime.engine.core_main import draft_depth, engine_core
from kvasir_runtime.engine.messages import StepOutputs
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.kv_cache.spec import KvSpec, make_layout
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import StepPlan, StepResult, TimedStep
from kvasir_runtime.speculative.depth import DepthPolicy, FixedDepth

BLOCK_SIZE = 8
BUDGET = 16
SPEC = KvSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype="float32", itemsize=4)


@dataclass
class Device:
    """Draws token 7 for everybody, and says how many steps were handed over when the first result was asked for."""

    plans: list[StepPlan] = field(default_factory=list)
    num_before_first_result: int | None = None

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def sample(self) -> "Future[PendingStep]":
        future: Future[PendingStep] = Future()
        future.set_result(PendingStep(self, self.plans[-1]))
        return future

    def recover(self) -> None:
        raise AssertionError("no step fails")

    def use_idle_time(self) -> None:
        """Nothing is left to do."""

    def prepare_grammar(self, grammar: str) -> "Future[None]":
        raise AssertionError("no request has one")


@dataclass
class PendingStep:
    device: Device
    plan: StepPlan

    def result(self) -> StepResult:
        device = self.device
        if device.num_before_first_result is None:
            device.num_before_first_result = len(device.plans)
        ones = np.ones(int(self.plan.samples.sum()), dtype=np.int32)
        return StepResult(7 * ones[:, None], ones, 0 * ones)


@dataclass
class Channel:
    inbox: deque[AddRequest] = field(default_factory=deque)
    sent: list[StepOutputs] = field(default_factory=list)

    def receive(self, timeout_seconds: float | None) -> list[Any]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, api_index: int, message: StepOutputs) -> None:
        self.sent.append(message)

    def broadcast(self, message: StepOutputs) -> None:
        """Nobody reads statistics."""

    def forget(self, api_index: int) -> None:
        """None dies."""

    def outputs(self) -> list[Any]:
        return [output for message in self.sent for output in message.outputs]


@dataclass
class Engine:
    core: EngineCore
    device: Device
    channel: Channel

    def add(self, request_id: str, first_token: int = 1, **request: Any) -> None:
        """A prompt as long as a step's budget, told from others' by its first token."""
        message = AddRequest(
            request_id=request_id, api_index=0, arrival_time=0.0, sequences=[SequenceStart(index=0, seed=0)],
            spec=RequestSpec(
                prompt_token_ids=[first_token] * BUDGET, sampling=SamplingParams(max_tokens=2, seed=0), **request
            ),
        )  # fmt: skip
        self.channel.inbox.append(message)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.core.step()

    def admitted(self) -> list[int]:
        return [new.token_ids[0] for plan in self.device.plans for new in plan.added]


def make_engine(
    device: str = "cpu", *, scheduler: SchedulerConfig | None = None, cache: CacheConfig | None = None,
    depth: "WatchedDepth | None" = None, speculative: SpeculativeConfig | None = None, num_stages: int = 1,
) -> Engine:  # fmt: skip
    config = RuntimeConfig(
        model=ModelConfig(model="m"),
        scheduler=scheduler or SchedulerConfig(),
        cache=cache or CacheConfig(block_size=BLOCK_SIZE),
        execution=ExecutionConfig(speculative_config=speculative),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
    )
    rank = RankDescription(
        layout=make_layout([SPEC], BLOCK_SIZE), kv_specs=(SPEC,), num_blocks=64, max_model_len=32,
        max_num_batched_tokens=BUDGET, vocab_size=64, attention_backend="reference", device=device, startup_seconds={},
    )  # fmt: skip
    executor, channel = Device(), Channel()
    core = engine_core(config, rank, executor, channel, None, depth=depth)  # type: ignore[arg-type]
    return Engine(core, executor, channel)


@pytest.mark.parametrize(
    ("device", "async_scheduling", "steps_ahead", "num_stages", "expected"),
    [
        ("cpu", None, 1, 1, 0),
        ("cpu", None, 3, 1, 0),
        ("cpu", True, 1, 1, 1),
        ("cpu", True, 3, 1, 3),
        ("cpu", False, 3, 1, 0),
        ("cuda", None, 1, 1, 1),
        ("cuda:1", None, 3, 1, 3),
        ("cuda", True, 3, 1, 3),
        ("cuda", False, 3, 1, 0),
        ("cpu", None, 1, 4, 3),
        ("cpu", False, 1, 2, 1),
        ("cuda", None, 1, 4, 3),
        ("cuda", None, 5, 4, 5),
    ],
)
def test_steps_are_planned_ahead_as_the_device_the_flags_and_the_stages_ask(
    device: str, async_scheduling: bool | None, steps_ahead: int, num_stages: int, expected: int
) -> None:
    scheduler = SchedulerConfig(async_scheduling=async_scheduling, steps_ahead=steps_ahead)
    engine = make_engine(device, scheduler=scheduler, num_stages=num_stages)
    for number in range(8):  # each fills a step
        engine.add(str(number), first_token=number)
    engine.run(8)
    assert engine.device.num_before_first_result == 1 + expected


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3]), ("priority", [3, 1, 2]), ("fair", [1, 3, 2])])
def test_the_policy_orders_those_that_wait(policy: Any, order: list[int]) -> None:
    engine = make_engine(scheduler=SchedulerConfig(scheduling_policy=policy, max_num_seqs=1))
    engine.add("a", 1, tenant="first")
    engine.add("b", 2, tenant="first")
    engine.add("c", 3, tenant="second", priority=-1)
    engine.run(12)
    assert engine.admitted() == order


@pytest.mark.parametrize(("threshold", "order"), [(0, [1, 2]), (10, [1, 2]), (9, [1, 2, 1])])
def test_a_better_priority_preempts_as_the_flags_say(threshold: int, order: list[int]) -> None:
    scheduler = SchedulerConfig(
        scheduling_policy="priority", max_num_seqs=1, priority_preemption_threshold=threshold, async_scheduling=False
    )
    engine = make_engine(scheduler=scheduler)
    engine.add("a", 1, priority=9)
    engine.run(1)
    engine.add("b", 2)
    engine.run(12)
    assert engine.admitted() == order


@pytest.mark.parametrize(("is_on", "num_cached"), [(True, BUDGET - BLOCK_SIZE), (False, 0)])
def test_prefixes_are_cached_unless_switched_off(is_on: bool, num_cached: int) -> None:
    engine = make_engine(cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=is_on))
    for name in ("first", "again"):
        engine.add(name)
        engine.run(4)
    found = {output.request_id: output.num_cached_tokens for output in engine.channel.outputs()}
    assert found == {"first": 0, "again": num_cached}


@pytest.mark.parametrize(("is_chunked", "lengths"), [(True, [16, 1, 15]), (False, [16, 1])])
def test_prompts_are_cut_to_the_budget_unless_switched_off(is_chunked: bool, lengths: list[int]) -> None:
    engine = make_engine(scheduler=SchedulerConfig(enable_chunked_prefill=is_chunked))
    engine.add("a", 1)
    engine.run(1)
    engine.add("b", 2)
    engine.run(1)
    assert [n for plan in engine.device.plans for n in plan.num_new_tokens.tolist()] == lengths


@dataclass
class WatchedDepth:
    fixed: FixedDepth = field(default_factory=lambda: FixedDepth(3))
    steps: list[TimedStep] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fixed, name)

    def observe_step(self, step: TimedStep) -> None:
        self.steps.append(step)


def test_who_decides_on_depth_is_asked_by_the_scheduler_and_told_what_steps_take() -> None:
    depth = WatchedDepth()
    engine = make_engine(depth=depth)
    engine.add("a")
    engine.run(2)
    assert engine.device.plans[0].num_proposals == 3
    assert [(step.num_prompt_tokens, step.num_proposals) for step in depth.steps][:1] == [(BUDGET, 3)]


@pytest.mark.parametrize(("num_tokens", "expected"), [(3, 3), (None, 0)])
def test_as_many_drafts_are_asked_for_as_the_configuration_says(num_tokens: int | None, expected: int) -> None:
    fixed = num_tokens and SpeculativeConfig(method="ngram", num_speculative_tokens=num_tokens, adaptive=False)
    engine = make_engine(speculative=fixed or None)
    engine.add("a")
    engine.run(1)
    assert engine.device.plans[0].num_proposals == expected


def test_depth_follows_what_pays_unless_it_is_fixed() -> None:
    assert draft_depth(None, 8) is None
    adaptive = draft_depth(SpeculativeConfig(method="ngram", num_speculative_tokens=5), 8)
    assert isinstance(adaptive, DepthPolicy)
    assert adaptive.max_depth == 5
    assert draft_depth(SpeculativeConfig(method="ngram", num_speculative_tokens=5, adaptive=False), 8) == FixedDepth(5)
