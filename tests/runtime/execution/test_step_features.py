"""A feature is one object: what it keeps by row, what layers read of it, also on graphs and earlier pipeline stages,
and what comes back under its name."""

from collections.abc import Callable
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.runtime.padded_graphs import PaddedGraphs
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.captures import RecordingCapture, ToCapture
from kvasir_runtime.execution.graphs import STEPS_BEFORE_RECORDING, DecodeGraphs, GraphMemory
from kvasir_runtime.execution.layer_runner import LayerRunner
from kvasir_runtime.execution.model_runner import ModelRunner
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.step_features import (
    DrawnStep,
    ForwardedStep,
    StepFeature,
    TensorColumns,
    TokenExtra,
    extra_buffers,
)
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.step_ops import cpu_step_ops
from kvasir_runtime.models.decoder import ComputeStep, DecoderOutput
from kvasir_runtime.scheduling.step import StepPlan, StepResult

VOCAB_SIZE = 64


class Shift(StepFeature):
    """Each sequence's next token lies so far behind its last as its salt is long."""

    name = "shift"
    asked_by = attrgetter("cache_salt")
    extras = MappingProxyType({"shift": TokenExtra((1,), torch.int64)})

    def __init__(self, rows: Rows) -> None:
        self.num_calls = 0
        self._shifts = np.zeros(len(rows.prompt_lens), dtype=np.int64)
        self.wants = np.zeros(len(rows.prompt_lens), dtype=np.bool_)

    def on_rows(self, plan: StepPlan) -> None:
        for new in plan.added:
            self._shifts[new.row] = len(new.spec.cache_salt or "")
            self.wants[new.row] = bool(new.spec.cache_salt)

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        self.num_calls += 1
        of_tokens = torch.from_numpy(np.repeat(self._shifts[plan.rows], inputs.lengths.query_lens))
        inputs.extras["shift"][: len(of_tokens), 0] = of_tokens
        return None

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        own = step.positions.having(self.name, self.wants)
        assert own is not None
        return {
            "rows": own.host_rows,
            "token_ids": own.of(step.inputs.token_ids),
            "shifts": self._shifts[own.host_rows],
        }


class Shifted:
    """Layers that read the shifts."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._identity = torch.eye(VOCAB_SIZE)

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        self.num_calls += 1
        shifts = inputs.extras["shift"][: inputs.token_ids.shape[0]].squeeze(1)
        hidden = self._identity.index_select(0, torch.remainder(torch.add(inputs.token_ids, shifts), VOCAB_SIZE))
        return DecoderOutput(hidden if kept_tokens is None else hidden[kept_tokens], ())


def recorded(layers: Shifted, rows: Rows, extras: dict[str, Tensor]) -> DecodeGraphs:
    library = load_library()
    assert library is not None
    capture = RecordingCapture(library, ToCapture(layers, rows.block_tables, 16, extras=extras))
    return DecodeGraphs(layers, capture, [1, 2, 3, 4], [1], GraphMemory(1 << 20), is_exact=True)


def padded(layers: Shifted, rows: Rows, extras: dict[str, Tensor]) -> ComputeStep:
    """As on CUDA: a graph of four requests."""
    graphs = PaddedGraphs(rows.block_tables, 16, [4], extras=extras)
    compute = graphs.of(layers, [1])
    graphs.capture_all()
    return compute


def runner_of(
    rows: Rows, compute: ComputeStep, feature: Shift, extras: dict[str, Tensor], transfers: Any
) -> ModelRunner:
    return ModelRunner(
        rows=rows, buffer=torch.zeros((4, 8), dtype=torch.uint8), compute=compute, to_logits=lambda hidden: hidden,
        ops=cpu_step_ops(), proposer=None, max_num_batched_tokens=16, transfers=transfers, features=[feature],
        extras=extras,
    )  # fmt: skip


def step(runner: ModelRunner, plan: StepPlan) -> StepResult:
    runner.forward(plan)
    return runner.sample().result()


@pytest.mark.parametrize("on_graphs", [None, recorded, padded])
def test_layers_read_what_it_fills_in_anew_for_each_step(
    on_graphs: Callable[..., ComputeStep] | None, make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows(vocab_size=VOCAB_SIZE)
    feature, layers = Shift(rows), Shifted()
    extras = extra_buffers([feature], 16, transfers.device)
    compute = layers if on_graphs is None else on_graphs(layers, rows, extras)
    runner = runner_of(rows, compute, feature, extras, transfers)
    added = [new_sequence(row, [1], salt="+" * row) for row in range(3)]
    decodes = [(0, 1), (1, 1), (2, 1)]
    expected, number = [1, 1, 1], STEPS_BEFORE_RECORDING + 3
    for position in range(number):
        if position == number - 2:  # another sequence takes the second row
            known = new_sequence(1, [expected[1]] * (position + 1), computed=position, salt="+++++")
        added = added if position == 0 else [known] if position == number - 2 else []
        result = step(runner, make_plan(decodes=decodes, starts=[position] * 3, added=added))
        shifts = [0, 1 if position < number - 2 else 5, 2]
        expected = [(token + shift) % VOCAB_SIZE for token, shift in zip(expected, shifts, strict=True)]
        assert result.token_ids[:, 0].tolist() == expected
    assert layers.num_calls == (STEPS_BEFORE_RECORDING if on_graphs is recorded else number)


def test_what_it_says_of_rows_comes_back_under_its_name(
    make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows(vocab_size=VOCAB_SIZE)
    feature = Shift(rows)
    extras = extra_buffers([feature], 16, transfers.device)
    runner = runner_of(rows, Shifted(), feature, extras, transfers)
    added = [new_sequence(0, [7]), new_sequence(1, [8], salt="++")]
    result = step(runner, make_plan(decodes=[(0, 1), (1, 1)], starts=[0, 0], added=added))
    assert {name: column.tolist() for name, column in result.columns["shift"].items()} == {
        "rows": [1], "token_ids": [8], "shifts": [2],
    }  # fmt: skip


def test_a_step_of_rows_that_do_not_want_it_calls_nothing(
    make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows(vocab_size=VOCAB_SIZE)
    feature = Shift(rows)
    runner = runner_of(rows, Shifted(), feature, extra_buffers([feature], 16, transfers.device), transfers)
    added = [new_sequence(0, [7]), new_sequence(1, [8], salt="++")]
    result = step(runner, make_plan(decodes=[(0, 1)], starts=[0], added=added))
    assert (feature.num_calls, result.columns) == (0, {})
    step(runner, make_plan(decodes=[(0, 1), (1, 1)], starts=[1, 0]))
    assert feature.num_calls == 1


def test_an_earlier_stages_layers_read_it_too(
    make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows(vocab_size=1)
    feature = Shift(rows)
    extras = extra_buffers([feature], 16, transfers.device)
    runner = LayerRunner(
        rows=rows, buffer=torch.zeros((4, 8), dtype=torch.uint8), compute=Shifted(), ops=cpu_step_ops(),
        max_num_batched_tokens=16, transfers=transfers, features=[feature], extras=extras,
    )  # fmt: skip
    lines = runner.run(make_plan(chunks=[(0, 0, 2, True)], added=[new_sequence(0, [7, 9], salt="+++")]))
    assert lines.argmax(1).tolist() == [10, 12]
