"""Adaptive depth in the engine itself: drafts that do not pay are left, come back once they do, and no token changes.

What steps take is told to the policy as the core tells it, but by a price list: the clock decides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.exactness.conftest import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PLAIN,
    Engine,
    Reference,
    engine_over,
)
from torch import Tensor

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.depth import FEWEST_STEPS_BETWEEN_TRIALS, DepthPolicy, Depths, IntArray
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep

NUM_DRAFTS = 4
CHEAP, DEAR = 0.02, 0.85
"""Of a draft, and of drafting at all, in plain steps: four that hold bring their tokens in less time, or in more."""
STEPS_TO_LEAVE = 60
"""Three without drafts and three with them are timed, and what drafts were believed to be is unlearned."""


class Oracle:
    """Knows what the target will write, and says so or something else."""

    name = "oracle"
    wants_hidden = False
    captured_layers: tuple[int, ...] = ()
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self, expected: Reference) -> None:
        self._texts = [[*prompt, *output] for prompt, output in zip(expected.prompts, expected.outputs, strict=True)]
        self.is_right = True

    def bind(self, setup: ProposerSetup) -> None:
        """Nothing of it is needed."""

    def propose(self, step: VerifiedStep) -> Tensor:
        drafts = torch.full((len(step.rows), step.num_proposals), -1, dtype=torch.int32)
        for own, row, num_known in zip(drafts, step.rows.tolist(), step.num_known.tolist(), strict=True):
            known = step.token_ids[row, :num_known].tolist()
            after = next((text[num_known:] for text in self._texts if text[:num_known] == known), [])[: len(own)]
            own[: len(after)] = torch.tensor(after, dtype=torch.int32) ^ (not self.is_right)
        return drafts


class PricedDepth(DepthPolicy):
    def __init__(self) -> None:
        super().__init__(MAX_NUM_SEQS, NUM_DRAFTS)
        self.draft_cost = CHEAP
        self.planned: list[int] = []
        """Of each step that decodes."""

    def depths(self, rows: IntArray) -> Depths:
        depths = super().depths(rows)
        self.planned.append(int(depths.max()))
        return depths

    def observe_step(self, step: TimedStep) -> None:
        depth = step.num_asked / max(1, step.num_decodes)
        seconds = 1 + self.draft_cost * (depth + bool(step.num_proposals))
        super().observe_step(replace(step, seconds=seconds, is_warming_up=False))


@dataclass
class Served:
    engine: Engine
    expected: Reference
    oracle: Oracle
    depth: PricedDepth
    num_answers: int = 0

    def answer(self, number: int) -> list[int]:
        """Prompts one after the other, whose answers are the target's; the depths planned meanwhile."""
        num_planned = len(self.depth.planned)
        for _ in range(number):
            name, index = f"{self.num_answers}", self.num_answers % len(self.expected.prompts)
            self.engine.add(name, self.expected.prompts[index])
            assert self.engine.finish(name).token_ids(name) == self.expected.outputs[index]
            self.num_answers += 1
        return self.depth.planned[num_planned:]


@pytest.fixture
def served(reference: Callable[[str], Reference]) -> Iterator[Served]:
    expected = reference("LlamaForCausalLM")
    oracle, depth = Oracle(expected), PricedDepth()
    worker = load_worker(
        ModelConfig(model=str(expected.folder), max_model_len=MAX_MODEL_LEN, device="cpu"),
        CacheConfig(block_size=BLOCK_SIZE),
        ExecutionConfig(
            num_threads=1, speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS)
        ),
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        lambda *parts: oracle,
    )
    executor = Executor(worker.runner)
    yield Served(engine_over(executor, worker.description, PLAIN, depth), expected, oracle, depth)
    executor.close()


@pytest.mark.parametrize("why", [{"is_right": False}, {"draft_cost": DEAR}], ids=str)
def test_drafts_that_do_not_pay_are_left_and_come_back_once_they_do(why: dict[str, Any], served: Served) -> None:
    served.oracle.is_right, served.depth.draft_cost = why.get("is_right", True), why.get("draft_cost", CHEAP)
    depths = served.answer(3)
    assert max(depths) == NUM_DRAFTS, "they are tried"
    assert np.count_nonzero(depths[STEPS_TO_LEAVE:]) < 0.1 * len(depths), "but for a look at each new request"
    served.oracle.is_right, served.depth.draft_cost = True, CHEAP
    missed = list(takewhile(lambda depths: not any(depths), (served.answer(1) for _ in range(20))))
    assert sum(map(len, missed)) < 3 * FEWEST_STEPS_BETWEEN_TRIALS
    assert (np.array(served.answer(4)) == NUM_DRAFTS).mean() > 0.8, "all steps but those that time plain ones"
