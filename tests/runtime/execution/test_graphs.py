"""Which decode steps run on graphs, which are captured and when; and that a padded step computes the same."""

import logging

import numpy as np
import pytest
import torch
from tests.runtime.padded_graphs import PaddedGraphs, PaddedStep
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.attention.step_lengths import DecodeBounds, StepLengths
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.execution.cuda_graph import CudaGraphCapture
from kvasir_runtime.execution.graphs import (
    STEPS_BEFORE_CAPTURE,
    CaptureError,
    DecodeGraphs,
    GraphMemory,
    GraphShape,
    graph_sizes,
)
from kvasir_runtime.models.decoder import DecoderOutput

PAGE, HEAD_DIM, NUM_ROWS, MAX_SEQ_LEN = 4, 16, 8, 64


class Attending:
    """A decoder of one attention layer; each token's query, key and value follow from its id."""

    def __init__(self, backend: AttentionBackend, device: str) -> None:
        random = torch.Generator().manual_seed(0)
        self.backend = backend
        self.vectors = torch.randn(100, 3, 2, HEAD_DIM, generator=random).to(device)
        self.tables = torch.arange(NUM_ROWS * MAX_SEQ_LEN // PAGE, dtype=torch.int32, device=device)
        self.tables = self.tables.view(1, NUM_ROWS, -1)
        pages = torch.randn(self.tables.numel(), 2, PAGE, 2, HEAD_DIM, generator=random).to(device)
        self.cache = LayerCache(pages[:, 0], pages[:, 1], group=0)
        self.angles = torch.randn(MAX_SEQ_LEN, HEAD_DIM, generator=random).to(device)
        self.num_calls = 0

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        self.num_calls += 1
        step = self.backend.prepare(inputs)
        query, key, value = self.vectors[inputs.token_ids].unbind(1)
        query = step.rotate_and_write(query, key.clone(), value, self.cache, self.angles, self.angles, None)
        attended = step.attend(query, self.cache, scale=0.5, window=None, softcap=None).flatten(1)
        return DecoderOutput(attended if kept_tokens is None else attended[kept_tokens], (attended * 2,))


def step_of(tables: Tensor, seq_lens: list[int], query_len: int = 1, num_decodes: int | None = None) -> StepInputs:
    """Request i in row 7 - i."""
    num_requests, device = len(seq_lens), tables.device
    rows = torch.arange(NUM_ROWS - 1, NUM_ROWS - 1 - num_requests, -1, dtype=torch.int32, device=device)
    ends = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    positions = (ends.unsqueeze(1) - query_len + torch.arange(query_len, device=device)).flatten().long()
    slots = tables[0, rows.long().repeat_interleave(query_len), positions // PAGE].long() * PAGE + positions % PAGE
    return StepInputs(
        token_ids=torch.arange(num_requests * query_len, device=device) + 3 * sum(seq_lens) % 50,
        positions=positions,
        query_starts=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * query_len,
        seq_lens=ends,
        rows=rows,
        groups=(GroupInputs(tables[0], slots),),
        lengths=StepLengths(
            np.full(num_requests, query_len, dtype=np.int32),
            num_requests if num_decodes is None else num_decodes,
            max(seq_lens),
        ),
    )


class Rig:
    def __init__(
        self, sizes: list[int], query_lens: list[int], limit: int = 1000, failing: int | None = None, **options: bool
    ) -> None:
        self.eager = Attending(ReferenceAttention(), "cpu")
        self.padded = Attending(ReferenceAttention(), "cpu")
        self.steps: dict[GraphShape, PaddedStep] = {}
        self._failing = failing
        self.graphs = DecodeGraphs(self.eager, self.capture, sizes, query_lens, GraphMemory(limit), **options)

    def capture(self, shape: GraphShape) -> PaddedStep:
        if shape.num_requests == self._failing:
            raise CaptureError("out of memory")
        self.steps[shape] = PaddedStep(self.padded, shape, self.padded.tables, MAX_SEQ_LEN, memory_bytes=100)
        return self.steps[shape]

    def run(self, num_requests: int, query_len: int = 1, kept: Tensor | None = None) -> None:
        self.graphs(step_of(self.eager.tables, [9] * num_requests, query_len), kept)

    def capture_all(self) -> None:
        while self.graphs.capture_next():
            pass


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (16, [1, 2, 4, 8, 12, 16]), (50, [1, 2, 4, 8, 12, 16, 24, 32, 48, 50])],
)
def test_sizes_end_with_the_most_sequences(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def test_nothing_is_captured_before_there_is_time_or_demand() -> None:
    rig = Rig([1, 2, 4], [1])
    for _ in range(STEPS_BEFORE_CAPTURE - 1):
        rig.run(2)
    assert rig.graphs.captured == []
    rig.run(2)
    assert rig.graphs.captured == [GraphShape(2, 1)]
    assert rig.eager.num_calls == STEPS_BEFORE_CAPTURE - 1
    assert rig.steps[GraphShape(2, 1)].num_replays == 1


def test_idle_time_captures_what_was_missed_most_then_the_largest() -> None:
    rig = Rig([1, 2, 4], [1, 3])
    rig.run(1)
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(1, 1)]
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(1, 1), GraphShape(4, 1)]
    rig.capture_all()
    assert rig.graphs.captured == [GraphShape(size, query_len) for size in (1, 2, 4) for query_len in (1, 3)]
    assert not rig.graphs.capture_next()


@pytest.mark.parametrize(("num_requests", "size"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_a_step_runs_on_the_smallest_graph_that_it_fits_into(num_requests: int, size: int) -> None:
    rig = Rig([1, 2, 4], [1])
    rig.capture_all()
    rig.run(num_requests)
    assert [shape.num_requests for shape, step in rig.steps.items() if step.num_replays] == [size]
    assert rig.eager.num_calls == 0


@pytest.mark.parametrize(("num_requests", "runs_on_graph"), [(1, False), (2, True), (3, True)])
def test_a_larger_graph_serves_if_half_of_it_is_used(num_requests: int, runs_on_graph: bool) -> None:
    rig = Rig([1, 2, 3, 4], [1])
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(4, 1)]
    rig.run(num_requests)
    assert rig.eager.num_calls == (0 if runs_on_graph else 1)


@pytest.mark.parametrize(("num_requests", "runs_on_graph"), [(1, True), (2, True), (3, False), (4, True), (5, False)])
def test_exact_graphs_pad_nothing_and_use_no_idle_time(num_requests: int, runs_on_graph: bool) -> None:
    rig = Rig([1, 2, 4], [1], is_exact=True)
    assert not rig.graphs.capture_next()
    for size in (1, 2, 4):
        for _ in range(STEPS_BEFORE_CAPTURE):
            rig.run(size)
    assert [shape.num_requests for shape in rig.graphs.captured] == [1, 2, 4]
    rig.eager.num_calls = 0
    rig.run(num_requests)
    assert rig.eager.num_calls == (0 if runs_on_graph else 1)


def test_exact_graphs_run_no_step_on_a_larger_one() -> None:
    rig = Rig([2, 3], [1], is_exact=True)
    for _ in range(STEPS_BEFORE_CAPTURE):
        rig.run(3)
    rig.eager.num_calls = 0
    rig.run(2)
    assert rig.eager.num_calls == 1


def test_other_steps_run_kernel_by_kernel() -> None:
    rig = Rig([1, 2], [1])
    rig.capture_all()
    tables = rig.eager.tables
    uneven = step_of(tables, [9, 9], query_len=2)
    uneven.lengths.query_lens[:] = [1, 3]
    uneven.query_starts[1] = 1
    rig.run(3)  # more than the largest graph
    rig.run(1, query_len=2)  # drafts, for which there is no graph
    rig.run(1, kept=torch.tensor([0]))
    rig.graphs(step_of(tables, [9, 9], num_decodes=1), None)  # a prefill chunk among them
    rig.graphs(uneven, None)  # one decode with drafts, one without
    assert rig.eager.num_calls == 5


def test_captures_end_when_their_memory_is_used_up() -> None:
    rig = Rig([1, 2, 4], [1], limit=150)
    rig.capture_all()
    assert rig.graphs.captured == [GraphShape(2, 1), GraphShape(4, 1)]


def test_a_capture_that_fails_ends_them_and_steps_go_on(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig([1, 2, 4], [1], failing=2)
    with caplog.at_level(logging.WARNING):
        rig.capture_all()
    assert rig.graphs.captured == [GraphShape(4, 1)]
    assert "num_requests=2" in caplog.text
    assert "out of memory" in caplog.text
    for _ in range(STEPS_BEFORE_CAPTURE + 1):
        rig.run(1)
    assert rig.eager.num_calls == STEPS_BEFORE_CAPTURE + 1


def test_graphs_of_drafts_come_after_the_targets_and_share_their_memory() -> None:
    target, drafts = Attending(ReferenceAttention(), "cpu"), Attending(ReferenceAttention(), "cpu")
    graphs = PaddedGraphs(target.tables, MAX_SEQ_LEN, [1, 2], num_bytes=250)
    graphs.of(target, [1])
    on_graphs = graphs.of(drafts, [2, 1])
    graphs.capture_all()
    assert [shape for shape, _ in graphs.steps] == [GraphShape(2, 1), GraphShape(1, 1), GraphShape(2, 2)]
    on_graphs(step_of(drafts.tables, [9, 9], query_len=2), None)
    assert [step.num_replays for _, step in graphs.steps] == [0, 0, 1]
    assert (target.num_calls, drafts.num_calls) == (0, 1)


def test_without_memory_there_are_no_graphs() -> None:
    eager = Attending(ReferenceAttention(), "cpu")
    graphs = PaddedGraphs(eager.tables, MAX_SEQ_LEN, [1], num_bytes=0)
    assert graphs.of(eager, [1]) is eager
    assert not graphs.capture_next()


@pytest.mark.parametrize("query_len", [1, 3])
def test_padded_steps_compute_and_write_what_eager_ones_do(query_len: int) -> None:
    rig = Rig([4], [query_len])
    rig.capture_all()
    for seq_lens in ([9, 30, 5, 17], [10, 31], [64, 3, 12], [20, 21, 22, 23], [7, 7]):
        inputs = step_of(rig.eager.tables, seq_lens, query_len)
        got, expected = rig.graphs(inputs, None), rig.eager(inputs, None)
        assert torch.equal(got.hidden, expected.hidden)
        assert torch.equal(got.captured[0], expected.captured[0])
        assert torch.equal(rig.padded.cache.key, rig.eager.cache.key)
        assert torch.equal(rig.padded.cache.value, rig.eager.cache.value)


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_cuda_graph_computes_and_writes_what_eager_steps_do(query_len: int) -> None:
    backend = TritonAttention(torch.device("cuda"), DecodeBounds(8, 3))
    eager, captured = Attending(backend, "cuda"), Attending(backend, "cuda")
    capture = CudaGraphCapture(captured, captured.tables, MAX_SEQ_LEN)
    graphs = DecodeGraphs(eager, capture, [2, 4], [query_len], GraphMemory(2**30))
    with torch.inference_mode():
        while graphs.capture_next():
            pass
        for seq_lens in ([9, 30, 5, 17], [10, 31], [64, 3, 12], [7, 7]):
            inputs = step_of(eager.tables, seq_lens, query_len)
            num_calls = eager.num_calls
            got = graphs(inputs, None).hidden.clone()
            assert eager.num_calls == num_calls
            assert torch.equal(got, eager(inputs, None).hidden)
            assert torch.equal(captured.cache.key, eager.cache.key)
