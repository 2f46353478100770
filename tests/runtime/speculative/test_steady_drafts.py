"""Steady decodes as a GPU drafts for them: nothing is read back, passes run on graphs, and drafts stay the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runtime.exactness.speculators import NUM_DRAFTS, speculative_config
from tests.runtime.speculative.conftest import MAX_MODEL_LEN, MAX_NUM_SEQS, PLACEMENT, Rank, prompt
from tests.runtime.speculative.host_reads import HostReads, unseen_by
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.execution.graphs import GraphShape
from kvasir_runtime.models.decoder import ComputeStep, Decoder, DecoderOutput
from kvasir_runtime.speculative.select import make_proposer

METHODS = ["draft_model", "eagle", "eagle3", "medusa"]
MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(target: Decoder, target_folder: Path, draft_folder: Path, tmp_path: Path) -> MakeRank:
    def make(
        method: str,
        *,
        never_waits: bool,
        is_twin: bool = False,
        backend: AttentionBackend | None = None,
        **given: Any,
    ) -> Rank:
        """`is_twin`: the draft model is the target, so that its drafts hold."""
        config = speculative_config(method, target_folder, target_folder if is_twin else draft_folder, tmp_path)
        proposer = make_proposer(config, target, PLACEMENT, backend or ReferenceAttention(), MAX_MODEL_LEN)
        return Rank(target, proposer, max_drafts=NUM_DRAFTS, never_waits=never_waits, **given)

    return make


def start(rank: Rank, num_sequences: int = MAX_NUM_SEQS) -> None:
    """Prompts, the second of which the proposer is not shown, and a step after which all are in step."""
    for row in range(num_sequences):
        rank.add(row, prompt(5 + 4 * row, seed=row))
        rank.step([], {row: 5 + 4 * row}, num_proposals=0 if row == 1 else NUM_DRAFTS)
    rank.step(list(range(num_sequences)), {}, NUM_DRAFTS)


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> HostReads:
    return HostReads(monkeypatch)


class UnseenAttention(ReferenceAttention):
    """The reference reads lengths, which no GPU's backend does."""

    def __init__(self, reads: HostReads) -> None:
        self._reads = reads

    def prepare(self, inputs: StepInputs) -> Any:
        step = super().prepare(inputs)
        return SimpleNamespace(
            rotate_and_write=unseen_by(self._reads, step.rotate_and_write), attend=unseen_by(self._reads, step.attend)
        )


@pytest.mark.parametrize("method", METHODS)
def test_proposing_for_a_steady_decode_reads_and_sends_nothing(
    method: str, make_rank: MakeRank, host_reads: HostReads
) -> None:
    rank = make_rank(method, never_waits=True, backend=UnseenAttention(host_reads))
    start(rank)
    rank.while_proposing = host_reads
    for _ in range(4):
        rank.step([0, 1, 2], {}, NUM_DRAFTS)
    assert host_reads.found == []


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_what_joins_a_batch_is_looked_at(method: str, make_rank: MakeRank, host_reads: HostReads) -> None:
    rank = make_rank(method, never_waits=True, backend=UnseenAttention(host_reads))
    start(rank, num_sequences=2)
    rank.add(2, prompt(9, seed=9))
    rank.while_proposing = host_reads
    rank.step([0, 1], {2: 9}, NUM_DRAFTS)
    assert host_reads.found


def test_ranks_whose_drafts_were_rounded_apart_run_the_same_passes(make_rank: MakeRank) -> None:
    """What the first rank's draft lacks is what the others compute, whatever they have."""
    found: list[Tensor] = []

    def agree(num_lacking: Tensor) -> Tensor:
        found.append(num_lacking)
        return torch.full_like(num_lacking, 3)

    rank = make_rank("draft_model", never_waits=True, agree=agree)
    start(rank)
    num_looks = len(found)
    rank.step([0, 1, 2], {}, NUM_DRAFTS)
    assert len(found) == num_looks, "a steady step asks nobody"


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_pass_may_be_run_again_on_the_states_that_graphs_are_entered_by(method: str, make_rank: MakeRank) -> None:
    """As a capture does before the replay that is asked for: EAGLE-3's norm adds to its states in place."""
    expected = make_rank(method, never_waits=True)
    rank = make_rank(method, never_waits=True, around=lambda compute: partial(computed_twice, compute))
    for one in (expected, rank):
        start(one)
        one.step([0, 1, 2], {}, NUM_DRAFTS)
        one.step([0, 1, 2], {}, NUM_DRAFTS)
    assert any(rank.drafts)
    assert rank.drafts == expected.drafts


def computed_twice(compute: ComputeStep, *args: Any) -> DecoderOutput:
    compute(*args)
    return compute(*args)


@pytest.mark.parametrize("is_twin", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("are_captured", [False, True])
def test_drafts_without_waiting_are_those_made_with_it(
    method: str, is_twin: bool, are_captured: bool, make_rank: MakeRank
) -> None:
    """Rows fall out of the batch and come back, so that graphs are padded."""
    waiting = make_rank(method, never_waits=False, is_twin=is_twin)
    rank = make_rank(method, never_waits=True, is_twin=is_twin)
    for one in (waiting, rank):
        start(one)
    if are_captured:
        rank.graphs.capture_all()
    for decodes in ([0, 1, 2], [2, 0], [1], [0, 1, 2], [0, 1, 2]):
        held = [one.step(decodes, {}, NUM_DRAFTS) for one in (waiting, rank)]
        assert held[0] == held[1]
        assert rank.drafts == waiting.drafts
    assert any(rank.drafts)


@pytest.mark.parametrize(
    ("method", "query_lens"), [("draft_model", [2, 1, 1]), ("eagle", [4, 1, 1]), ("eagle3", [4, 1, 1])]
)
def test_all_passes_of_a_steady_decode_run_on_graphs(
    method: str, query_lens: list[int], make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(method, never_waits=True)
    start(rank, num_sequences=1)
    rank.graphs.capture_all()
    passes = []
    for shape, step in rank.graphs.steps:
        monkeypatch.setattr(step, "replay", partial(note_and_replay, passes, shape, step.replay))
    while len(rank.drafts[0]) < NUM_DRAFTS:
        rank.step([0], {}, NUM_DRAFTS)
    passes.clear()
    rank.step([0], {}, NUM_DRAFTS)
    assert passes == [GraphShape(1, query_len) for query_len in query_lens]


def note_and_replay(passes: list[GraphShape], shape: GraphShape, replay: Callable[..., Any], inputs: Any) -> Any:
    passes.append(shape)
    return replay(inputs)
