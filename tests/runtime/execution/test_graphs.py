"""Which decode steps run on graphs, which are captured and when; and that a padded step computes the same."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS
from tests.runtime.padded_graphs import PaddedGraphs, PaddedStep
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, DecodeBounds, GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.execution.captures import CudaGraphCapture, RecordingCapture, StaticInputs, ToCapture
from kvasir_runtime.execution.graphs import (
    STEPS_BEFORE_CAPTURE,
    STEPS_BEFORE_RECORDING,
    CaptureError,
    DecodeGraphs,
    GraphMemory,
    GraphShape,
    graph_sizes,
)
from kvasir_runtime.kernels.inputs import LoadInputs, StepLengths, load_inputs_reference
from kvasir_runtime.kernels.inputs_triton import triton_load_inputs
from kvasir_runtime.kernels.native import load_library
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


def step_of(
    tables: Tensor, seq_lens: list[int], query_lens: int | list[int] = 1, num_decodes: int | None = None
) -> StepInputs:
    """Request i in row 7 - i."""
    num_requests, device = len(seq_lens), tables.device
    lengths = [query_lens] * num_requests if isinstance(query_lens, int) else query_lens
    rows = torch.arange(NUM_ROWS - 1, NUM_ROWS - 1 - num_requests, -1, dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(end - n, end) for end, n in zip(seq_lens, lengths, strict=True)]).to(device)
    row_of = rows.long().repeat_interleave(torch.tensor(lengths, device=device))
    slots = tables[0, row_of, positions // PAGE].long() * PAGE + positions % PAGE
    return StepInputs(
        token_ids=torch.arange(sum(lengths), device=device) + 3 * sum(seq_lens) % 50,
        positions=positions,
        query_starts=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        rows=rows,
        groups=(GroupInputs(tables[0], slots),),
        lengths=StepLengths(
            np.array(lengths, dtype=np.int32), num_requests if num_decodes is None else num_decodes, max(seq_lens)
        ),
    )


class Rig:
    def __init__(
        self,
        sizes: list[int],
        query_lens: list[int],
        limit: int = 10_000,
        failing: int | None = None,
        backend: AttentionBackend | None = None,
        **options: Any,
    ) -> None:
        self.eager = Attending(backend or ReferenceAttention(), "cpu")
        self.padded = Attending(backend or ReferenceAttention(), "cpu")
        self.steps: dict[GraphShape, PaddedStep] = {}
        self._failing = failing
        self.graphs = DecodeGraphs(self.eager, self.capture, sizes, query_lens, GraphMemory(limit), **options)

    def capture(self, shape: GraphShape) -> PaddedStep:
        if shape.num_requests == self._failing:
            raise CaptureError("out of memory")
        self.steps[shape] = PaddedStep(self.padded, shape, self.padded.tables, MAX_SEQ_LEN, memory_bytes=100)
        return self.steps[shape]

    def run(self, num_requests: int, query_lens: int | list[int] = 1, kept: Tensor | None = None) -> None:
        self.graphs(step_of(self.eager.tables, [9] * num_requests, query_lens), kept)

    @property
    def replayed(self) -> list[GraphShape]:
        return [shape for shape, step in self.steps.items() if step.num_replays]

    def capture_all(self) -> None:
        while self.graphs.capture_next():
            pass


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (16, [1, 2, 4, 8, 12, 16]), (50, [1, 2, 4, 8, 12, 16, 24, 32, 48, 50])],
)
def test_sizes_end_with_the_most_sequences(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def test_forgotten_graphs_are_captured_again_in_the_memory_that_they_had() -> None:
    rig = Rig([1, 2, 4], [1], limit=250)
    rig.capture_all()
    captured = rig.graphs.captured
    rig.graphs.forget()
    assert (rig.graphs.captured, len(captured)) == ([], 3)
    rig.run(2)
    assert rig.replayed == []
    rig.capture_all()
    assert rig.graphs.captured == captured


def test_nothing_is_captured_before_there_is_time_or_demand() -> None:
    rig = Rig([1, 2, 4], [1])
    for _ in range(STEPS_BEFORE_CAPTURE - 1):
        rig.run(2)
    assert rig.graphs.captured == []
    rig.run(2)
    assert rig.graphs.captured == [GraphShape(2, 1)]
    assert rig.eager.num_calls == STEPS_BEFORE_CAPTURE - 1
    assert rig.steps[GraphShape(2, 1)].num_replays == 1


def test_idle_time_captures_what_was_missed_most_then_the_smallest() -> None:
    rig = Rig([1, 2, 4], [1, 3])
    rig.run(4)
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(4, 1)]
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(1, 1), GraphShape(4, 1)]
    rig.capture_all()
    of_equal_requests = [GraphShape(size, query_len) for size in (1, 2, 4) for query_len in (1, 3)]
    assert sorted(list(rig.steps)[:6]) == sorted(of_equal_requests)
    assert list(rig.steps)[6:] == [GraphShape(size, 2, max_query_len=3) for size in (1, 2, 4)]
    assert not rig.graphs.capture_next()


@pytest.mark.parametrize(("num_requests", "size"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_a_step_runs_on_the_smallest_graph_that_it_fits_into(num_requests: int, size: int) -> None:
    rig = Rig([1, 2, 4], [1])
    rig.capture_all()
    rig.run(num_requests)
    assert rig.replayed == [GraphShape(size, 1)]
    assert rig.eager.num_calls == 0


@pytest.mark.parametrize(
    ("query_lens", "shape"),
    [
        ([6, 6, 6], GraphShape(4, 6)),
        ([1, 1, 1], GraphShape(4, 1)),
        ([3], GraphShape(1, 4, max_query_len=6)),
        ([1, 2, 1, 1], GraphShape(4, 2, max_query_len=6)),
        ([6, 1, 1], GraphShape(4, 2, max_query_len=6)),
        ([6, 1, 1, 1], GraphShape(4, 4, max_query_len=6)),
        ([6, 3], GraphShape(2, 6)),
        ([2, 1, 1], GraphShape(4, 2, max_query_len=6)),
        ([1, 2], GraphShape(2, 2, max_query_len=6)),
    ],
    ids=str,
)
def test_requests_of_any_lengths_run_on_the_smallest_graph_that_has_room_for_their_tokens(
    query_lens: list[int], shape: GraphShape
) -> None:
    rig = Rig([1, 2, 4], [6, 1])
    rig.capture_all()
    rig.run(len(query_lens), query_lens)
    assert rig.replayed == [shape]
    assert rig.eager.num_calls == 0


def test_a_mean_that_comes_up_often_is_captured_and_until_then_a_larger_one_serves() -> None:
    rig = Rig([4], [3, 1])
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(4, 3)]
    for _ in range(STEPS_BEFORE_CAPTURE):
        rig.run(4, [3, 2, 1, 1])
    assert rig.eager.num_calls == 0
    assert rig.graphs.captured == [GraphShape(4, 2, max_query_len=3), GraphShape(4, 3)]
    assert [step.num_replays for step in rig.steps.values()] == [STEPS_BEFORE_CAPTURE - 1, 1]


@pytest.mark.parametrize(("num_requests", "runs_on_graph"), [(1, False), (2, True), (3, True)])
def test_a_larger_graph_serves_if_half_of_it_is_used(num_requests: int, runs_on_graph: bool) -> None:
    rig = Rig([1, 2, 3, 4], [1])
    rig.run(4)
    assert rig.graphs.capture_next()
    assert rig.graphs.captured == [GraphShape(4, 1)]
    rig.eager.num_calls = 0
    rig.run(num_requests)
    assert rig.eager.num_calls == (0 if runs_on_graph else 1)


@pytest.mark.parametrize(("num_requests", "runs_on_graph"), [(1, True), (2, True), (3, False), (4, True), (5, False)])
def test_exact_graphs_pad_nothing_and_use_no_idle_time(num_requests: int, runs_on_graph: bool) -> None:
    rig = Rig([1, 2, 4], [3, 1], is_exact=True)
    assert not rig.graphs.capture_next()
    for size in (1, 2, 4):
        for _ in range(STEPS_BEFORE_RECORDING):
            rig.run(size)
    assert [shape.num_requests for shape in rig.graphs.captured] == [1, 2, 4]
    assert rig.eager.num_calls == 3 * (STEPS_BEFORE_RECORDING - 1)
    rig.eager.num_calls = 0
    rig.run(num_requests)
    assert rig.eager.num_calls == (0 if runs_on_graph else 1)


def test_exact_graphs_serve_as_many_tokens_however_requests_share_them() -> None:
    rig = Rig([2, 4], [6, 1], is_exact=True)
    for query_lens in ([3, 1], [2, 2], [1, 3], [1, 3]):
        rig.run(2, query_lens)
    assert rig.graphs.captured == [GraphShape(2, 2, max_query_len=6)]
    assert rig.eager.num_calls == STEPS_BEFORE_RECORDING - 1
    for _ in range(STEPS_BEFORE_RECORDING):
        rig.run(2, [4, 1])
    assert rig.graphs.captured[1:] == [GraphShape(2, 3, max_query_len=6, num_lacking=1)]
    assert rig.graphs.captured[1].num_tokens == 5


@pytest.mark.parametrize(("num_tokens", "is_recorded"), [(11, True), (12, False)])
def test_exact_graphs_of_unequal_requests_have_few_tokens(num_tokens: int, is_recorded: bool) -> None:
    rig = Rig([4], [6, 1], is_exact=True, most_uneven_tokens=11)
    for _ in range(STEPS_BEFORE_RECORDING):
        rig.run(4, [num_tokens - 6, 4, 1, 1])
        rig.run(4, 6)
    assert len(rig.graphs.captured) == 1 + is_recorded
    assert rig.graphs.take_warming_up()
    rig.run(4, [num_tokens - 6, 4, 1, 1])
    assert not rig.graphs.take_warming_up()


def test_exact_graphs_of_unequal_requests_are_not_many() -> None:
    rig = Rig([2], [6, 1], is_exact=True, most_uneven=1)
    for query_lens in ([6, 5], [4, 1], [6, 6], [1, 1]):
        for _ in range(STEPS_BEFORE_RECORDING):
            rig.run(2, query_lens)
    assert [shape.num_tokens for shape in rig.graphs.captured] == [2, 11, 12]
    rig.eager.num_calls = 0
    rig.run(2, [5, 6])
    assert rig.eager.num_calls == 0


def test_steps_that_wait_for_a_graph_warm_up() -> None:
    """The one of the capture too; not those that no graph is to be for."""
    rig = Rig([2], [1], is_exact=True)
    told = []
    for _ in range(STEPS_BEFORE_RECORDING + 1):
        rig.run(2)
        told.append(rig.graphs.take_warming_up())
    assert told == [True] * STEPS_BEFORE_RECORDING + [False]
    rig.run(1)
    assert not rig.graphs.take_warming_up()


def test_of_unequal_requests_on_a_cpu_the_step_of_the_capture_alone_warms_up() -> None:
    """Steps like it seldom come again, and take as long as they take."""
    rig = Rig([2], [6, 1], is_exact=True)
    told = []
    for _ in range(STEPS_BEFORE_RECORDING + 1):
        rig.run(2, [3, 1])
        told.append(rig.graphs.take_warming_up())
    assert told == [False] * (STEPS_BEFORE_RECORDING - 1) + [True, False]


def test_what_warmed_up_in_any_pass_of_a_step_is_told_once() -> None:
    decoder = Attending(ReferenceAttention(), "cpu")
    padded = PaddedGraphs(decoder.tables, MAX_SEQ_LEN, [1])
    for compute in [padded.of(decoder, [1]) for _ in range(2)]:
        compute(step_of(decoder.tables, [9]), None)
    assert [padded.take_warming_up(), padded.take_warming_up()] == [True, False]


def test_steps_do_not_warm_up_for_graphs_that_fail() -> None:
    rig = Rig([2], [1], failing=2, is_exact=True)
    for _ in range(STEPS_BEFORE_RECORDING):
        rig.run(2)
    assert rig.graphs.take_warming_up()
    rig.run(2)
    assert not rig.graphs.take_warming_up()


def test_exact_graphs_run_no_step_on_a_larger_one() -> None:
    rig = Rig([2, 3], [1], is_exact=True)
    for _ in range(STEPS_BEFORE_RECORDING):
        rig.run(3)
    rig.eager.num_calls = 0
    rig.run(2)
    assert rig.eager.num_calls == 1


def test_other_steps_run_kernel_by_kernel() -> None:
    rig = Rig([1, 2], [1])
    rig.capture_all()
    rig.run(3)  # more than the largest graph
    rig.run(1, query_lens=2)  # drafts, for which there is no graph
    rig.run(1, kept=torch.tensor([0]))
    rig.graphs(step_of(rig.eager.tables, [9, 9], num_decodes=1), None)  # a prefill chunk among them
    assert rig.eager.num_calls == 4


def test_captures_end_when_their_memory_is_used_up() -> None:
    rig = Rig([1, 2, 4], [1], limit=150)
    rig.capture_all()
    assert rig.graphs.captured == [GraphShape(1, 1), GraphShape(2, 1)]


def test_a_capture_that_fails_ends_them_and_steps_go_on(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig([1, 2, 4], [1], failing=2)
    with caplog.at_level(logging.WARNING):
        rig.capture_all()
    assert rig.graphs.captured == [GraphShape(1, 1)]
    assert "num_requests=2" in caplog.text
    assert "out of memory" in caplog.text
    for _ in range(STEPS_BEFORE_CAPTURE + 1):
        rig.run(4)
    assert rig.eager.num_calls == STEPS_BEFORE_CAPTURE + 1


def test_graphs_of_drafts_come_after_the_targets_and_share_their_memory() -> None:
    target, drafts = Attending(ReferenceAttention(), "cpu"), Attending(ReferenceAttention(), "cpu")
    graphs = PaddedGraphs(target.tables, MAX_SEQ_LEN, [1, 2], num_bytes=250)
    graphs.of(target, [1])
    on_graphs = graphs.of(drafts, [2, 1])
    graphs.capture_all()
    assert [shape for shape, _ in graphs.steps] == [GraphShape(1, 1), GraphShape(2, 1), GraphShape(1, 2)]
    on_graphs(step_of(drafts.tables, [9], query_lens=2), None)
    assert [step.num_replays for _, step in graphs.steps] == [0, 0, 1]
    assert (target.num_calls, drafts.num_calls) == (0, 1)


def test_without_memory_there_are_no_graphs() -> None:
    eager = Attending(ReferenceAttention(), "cpu")
    graphs = PaddedGraphs(eager.tables, MAX_SEQ_LEN, [1], num_bytes=0)
    assert graphs.of(eager, [1]) is eager
    assert not graphs.capture_next()


@pytest.fixture
def _nan_where_nothing_is_written() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills new memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("load_inputs", [load_inputs_reference, pytest.param(triton_load_inputs, marks=GPU_MARKS)])
@pytest.mark.parametrize("query_len", [1, 2])
def test_what_is_left_of_a_larger_step_reads_and_writes_nothing(query_len: int, load_inputs: LoadInputs) -> None:
    tables = Attending(ReferenceAttention(), DEVICE.type).tables
    static = StaticInputs(4, 4 * query_len, tables, MAX_SEQ_LEN, load_inputs=load_inputs)
    for num_requests in (4, 2):
        static.load(step_of(tables, [9, 30, 5, 17][:num_requests], query_len))
    assert static.inputs.seq_lens.tolist() == [9, 30, 0, 0]
    slots = static.inputs.groups[0].slots
    assert (slots[: 2 * query_len] >= 0).all()
    assert (slots[2 * query_len :] == -1).all()


EQUAL: list[tuple[list[int], int | list[int]]] = [
    *(([9, 30, 5, 17], 1), ([10, 31], 1), ([64, 3, 12], 1), ([20, 21, 22, 23], 1), ([7, 7], 1)),
    *(([9, 30, 5, 17], 3), ([10, 31], 3), ([7, 7], 3), ([64, 63, 62, 61], 6)),
]
"""Lengths of sequences, and how many of their tokens a step computes."""
DIFFERENT: list[tuple[list[int], int | list[int]]] = [
    *(([40, 30, 5, 17], [6, 1, 1, 1]), ([10, 31], [1, 3]), ([64, 3, 12], [2, 1, 4]), ([20, 50, 22, 23], [1, 6, 1, 4])),
    *(([20, 50, 22, 23], [1, 1, 2, 1]), ([64], [5])),
]


@pytest.mark.parametrize("steps", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_padded_steps_compute_and_write_what_eager_ones_do(steps: list[tuple[list[int], int | list[int]]]) -> None:
    assert_padding_changes_nothing(ReferenceAttention(), steps)


def assert_padding_changes_nothing(backend: AttentionBackend, steps: list[tuple[list[int], int | list[int]]]) -> None:
    rig = Rig([4], [6, 1], backend=backend)
    rig.capture_all()
    for seq_lens, query_lens in steps:
        inputs = step_of(rig.eager.tables, seq_lens, query_lens)
        got, expected = rig.graphs(inputs, None), rig.eager(inputs, None)
        assert torch.equal(got.hidden, expected.hidden), (seq_lens, query_lens)
        assert torch.equal(got.captured[0], expected.captured[0])
        assert torch.equal(rig.padded.cache.key, rig.eager.cache.key)
        assert torch.equal(rig.padded.cache.value, rig.eager.cache.value)
    assert rig.eager.num_calls == len(steps)


@torch.inference_mode()
@pytest.mark.parametrize("steps", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_replayed_steps_of_compiled_kernels_compute_and_write_what_eager_ones_do(
    steps: list[tuple[list[int], int | list[int]]],
) -> None:
    library = load_library()
    assert library is not None
    eager, recorded = Attending(CpuAttention(), "cpu"), Attending(CpuAttention(), "cpu")
    capture = RecordingCapture(library, ToCapture(recorded, recorded.tables, MAX_SEQ_LEN))
    on_graphs = DecodeGraphs(recorded, capture, [1, 2, 3, 4], [6, 1], GraphMemory(1 << 26), is_exact=True)
    for seq_lens, query_lens in steps * (STEPS_BEFORE_RECORDING + 2):
        inputs = step_of(eager.tables, seq_lens, query_lens)
        got, expected = on_graphs(inputs, None), eager(inputs, None)
        assert torch.equal(got.hidden, expected.hidden), (seq_lens, query_lens)
        assert torch.equal(got.captured[0], expected.captured[0])
        assert torch.equal(recorded.cache.key, eager.cache.key)
        assert torch.equal(recorded.cache.value, eager.cache.value)
    on_graphs.take_warming_up()
    on_graphs(inputs, None)
    assert not on_graphs.take_warming_up()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a CUDA graph does it there")
@pytest.mark.usefixtures("_nan_where_nothing_is_written")
def test_padded_steps_of_triton_kernels_do_so_over_memory_of_nan() -> None:
    bounds = DecodeBounds(max_num_decodes=4, max_query_len=6)
    backend = TritonAttention(DEVICE, bounds, num_sms=1, split_unit_keys=16)
    assert_padding_changes_nothing(backend, DIFFERENT)


class FakeCuda:
    """A device whose freed memory stays in torch's cache, as far as a capture sees of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cached: int) -> None:
        self.num_free, self.num_cached = 1000, num_cached
        for name in ("empty_cache", "mem_get_info", "graph_pool_handle", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name, object))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))

    def empty_cache(self) -> None:
        self.num_free += self.num_cached
        self.num_cached = 0

    def mem_get_info(self) -> tuple[int, int]:
        return self.num_free, 2000

    @contextmanager
    def graph(self, graph: object, **options: Any) -> Iterator[None]:
        self.empty_cache()
        yield
        self.num_free -= 300


def test_what_a_capture_frees_of_torchs_cache_hides_nothing_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, num_cached=500)
    decoder = Attending(ReferenceAttention(), "cpu")
    captured = CudaGraphCapture(ToCapture(decoder, decoder.tables, MAX_SEQ_LEN))(GraphShape(2, 1))
    assert captured.memory_bytes == 300


@pytest.mark.gpu
def test_a_cuda_graph_computes_and_writes_what_eager_steps_do() -> None:
    backend = TritonAttention(torch.device("cuda"), DecodeBounds(max_num_decodes=4, max_query_len=6))
    eager, captured = Attending(backend, "cuda"), Attending(backend, "cuda")
    capture = CudaGraphCapture(ToCapture(captured, captured.tables, MAX_SEQ_LEN, load_inputs=triton_load_inputs))
    memory = GraphMemory(2**40)  # what tests beside it take of the GPU counts, too
    graphs = DecodeGraphs(eager, capture, [2, 4], [6, 1], memory)
    with torch.inference_mode():
        while graphs.capture_next():
            pass
        for seq_lens, query_lens in EQUAL + DIFFERENT:
            inputs = step_of(eager.tables, seq_lens, query_lens)
            num_calls = eager.num_calls
            got = graphs(inputs, None).hidden.clone()
            assert eager.num_calls == num_calls
            assert torch.equal(got, eager(inputs, None).hidden)
            assert torch.equal(captured.cache.key, eager.cache.key)
