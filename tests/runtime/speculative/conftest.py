"""A toy rank: a tiny random target over real pages, greedy verification, and a proposer that sees its steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.runtime.padded_graphs import PaddedGraphs
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvasir_runtime.attention.backend import GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention, ReferenceStep
from kvasir_runtime.execution.captures import RecordingCapture, ToCapture
from kvasir_runtime.execution.graphs import Capture, GraphMemory, GraphShape, RunnerGraphs
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.ops import cpu_ops, reference_ops
from kvasir_runtime.kv_cache.spec import make_layout
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import ComputeStep, Decoder
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.proposer import (
    BatchRows,
    Proposer,
    ProposerSetup,
    VerifiedStep,
    as_found,
    kernel_by_kernel,
)

PLACEMENT = Placement(device=torch.device("cpu"), dtype=torch.float32, ops=reference_ops())
CPU_PLACEMENT = Placement(device=torch.device("cpu"), dtype=torch.float32, ops=cpu_ops())
"""Of the kernels that can be recorded."""
BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 3, 64
POISON_PAGE = 0
"""Belongs to somebody else: every table entry without a block names it."""
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


class Rank:
    """Blocks are given as a scheduler without lookahead gives them: for the tokens of a step and no more."""

    def __init__(
        self,
        target: Decoder,
        proposer: Proposer,
        max_model_len: int = MAX_MODEL_LEN,
        *,
        max_drafts: int = 6,
        never_waits: bool = False,
        records: bool = False,
        agree: Callable[[Tensor], Tensor] = as_found,
        around: Callable[[ComputeStep], ComputeStep] = lambda compute: compute,
    ) -> None:
        """`around` the proposer's passes; `never_waits` as on CUDA, where passes may also run on graphs; `records` as
        on CPUs: the proposer must have their kernels."""
        self.target, self.proposer = target, proposer
        self.token_ids = torch.zeros(MAX_NUM_SEQS, max_model_len + 1, dtype=torch.int32)
        self.known = [0] * MAX_NUM_SEQS
        self.computed = [0] * MAX_NUM_SEQS
        self.drafts: list[list[int]] = [[] for _ in range(MAX_NUM_SEQS)]
        self._was_shown = np.zeros(MAX_NUM_SEQS, dtype=np.bool_)
        self._copies: list[tuple[int, int]] = []
        self.while_proposing: AbstractContextManager[object] = nullcontext()
        specs = [*target.kv_specs(torch.float32), *proposer.kv_specs]
        layout = make_layout(specs, BLOCK_SIZE)
        self._pages = iter(range(1, 100))
        self.tables = [torch.full((MAX_NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE), POISON_PAGE, dtype=torch.int32)]
        self.tables *= len(layout.groups)
        shapes = [(100, BLOCK_SIZE, spec.num_kv_heads, spec.key_dim) for spec in specs]
        self.caches = [
            LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan), place.group)
            for shape, place in zip(shapes, layout.places, strict=True)
        ]
        tables = self.tables[0].expand(len(layout.groups), -1, -1)
        self.graphs = PaddedGraphs(tables, MAX_MODEL_LEN, [1, MAX_NUM_SEQS])
        self.recorded: list[GraphShape] = []

        def capture_of(compute: ComputeStep) -> Capture:
            capture = RecordingCapture(load_library(), ToCapture(compute, tables, MAX_MODEL_LEN))
            return lambda shape: self.recorded.append(shape) or capture(shape)

        recordings = RunnerGraphs(
            capture_of,
            range(1, MAX_NUM_SEQS + 1),
            GraphMemory(1 << 26),
            is_exact=True,
        )
        on_graphs = self.graphs.of if never_waits else recordings.of if records else kernel_by_kernel
        setup = ProposerSetup(
            caches=self.caches[len(target.layers) :],
            max_num_seqs=MAX_NUM_SEQS,
            max_drafts=max_drafts,
            never_waits=never_waits,
            on_graphs=lambda compute, query_lens: around(on_graphs(compute, query_lens)),
            agree=agree,
        )
        proposer.bind(setup)

    def add(self, row: int, token_ids: list[int]) -> None:
        self.token_ids[row, : len(token_ids)] = torch.tensor(token_ids)
        self.known[row], self.computed[row], self.drafts[row] = len(token_ids), 0, []
        self.tables[0][row] = POISON_PAGE
        self._was_shown[row] = False

    def share(self, source: int, target: int, num_blocks: int) -> None:
        """As if the prefix cache held the first blocks of both."""
        self.tables[0][target, :num_blocks] = self.tables[0][source, :num_blocks]
        self.computed[target] = num_blocks * BLOCK_SIZE

    def tokens(self, row: int) -> list[int]:
        tokens: list[int] = self.token_ids[row, : self.known[row]].tolist()
        return tokens

    def fork(self, source: int, target: int) -> None:
        """Whole blocks are shared; the one being filled is copied."""
        self.token_ids[target] = self.token_ids[source]
        self.known[target], self.computed[target] = self.known[source], self.computed[source]
        self.drafts[target] = list(self.drafts[source])
        self.tables[0][target] = self.tables[0][source]
        self._was_shown[target] = False
        filling = self.computed[source] // BLOCK_SIZE
        if self.computed[source] % BLOCK_SIZE:
            page, copy = int(self.tables[0][source, filling]), next(self._pages)
            self.tables[0][target, filling] = copy
            self._copies.append((page, copy))
            for cache in self.caches:
                cache.key[copy], cache.value[copy] = cache.key[page], cache.value[page]

    def step_end(self, row: int) -> int:
        """Tokens of the row, drafts included, that the last step had blocks for."""
        return self._ends[row]

    @torch.inference_mode()
    def step(self, decodes: list[int], chunks: dict[int, int], num_proposals: int) -> list[int]:
        """Decode rows with all their drafts and compute chunks of so many tokens; the numbers of drafts that held. The
        proposer is not shown a step without proposals."""
        rows = [*decodes, *chunks]
        new = [self._new_tokens(row, None) for row in decodes] + [
            self._new_tokens(row, length) for row, length in chunks.items()
        ]
        inputs = self._inputs(rows, new, len(decodes))
        attention = ReferenceAttention().prepare(inputs)
        num_layers, captured = len(self.target.layers), self.proposer.captured_layers
        output = self.target(inputs.token_ids, attention, self.caches[:num_layers], None, captured)
        drawn = self.target.logits(output.hidden).argmax(-1).tolist()
        sampled, last, held = [], [], []
        first = 0
        for index, (row, ids) in enumerate(zip(rows, new, strict=True)):
            if index < len(decodes) or self.computed[row] + len(ids) == self.known[row]:
                drafts = ids[1:] if index < len(decodes) else []
                num_held = next((i for i, d in enumerate(drafts) if d != drawn[first + i]), len(drafts))
                place = first + (num_held if index < len(decodes) else len(ids) - 1)
                brought = [*drafts[:num_held], drawn[place]]
                start = self.known[row]
                self.token_ids[row, start : start + len(brought)] = torch.tensor(brought, dtype=torch.int32)
                self.known[row] += len(brought)
                self.computed[row] = self.known[row] - 1
                sampled.append(index)
                last.append(place)
                held.append(num_held)
            else:
                self.computed[row] += len(ids)
            first += len(ids)
        own = [rows[index] for index in sampled]
        batch = BatchRows(np.array(rows), ~self._was_shown[rows], np.array(own), [()] * len(own))
        copies, self._copies = self._copies, []
        self._was_shown[rows] = num_proposals > 0
        for row in own:
            self.drafts[row] = []
        if not num_proposals:
            return held
        verified = VerifiedStep(
            inputs=inputs,
            hidden=output.hidden,
            captured=output.captured,
            sampled=torch.tensor(sampled, dtype=torch.int64),
            rows=torch.tensor(own, dtype=torch.int64),
            last_accepted=torch.tensor(last, dtype=torch.int64),
            next_tokens=torch.tensor([self.tokens(row)[-1] for row in own], dtype=torch.int64),
            num_known=torch.tensor([self.known[row] for row in own], dtype=torch.int64),
            num_slots=torch.tensor([self._num_slots(row) for row in own], dtype=torch.int64),
            token_ids=self.token_ids,
            batch=batch,
            block_copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
            num_proposals=num_proposals,
        )
        with self.while_proposing:
            proposed = self.proposer.propose(verified)
        assert proposed.shape == (len(own), num_proposals)
        assert proposed.dtype == torch.int32
        for row, line in zip(own, proposed.tolist(), strict=True):
            self.drafts[row] = line[: line.index(-1)] if -1 in line else line
        assert all(torch.isnan(cache.key[POISON_PAGE]).all() for cache in self.caches), "wrote into another's page"
        return held

    def _num_slots(self, row: int) -> int:
        return int((self.tables[0][row] != POISON_PAGE).sum()) * BLOCK_SIZE

    def _new_tokens(self, row: int, length: int | None) -> list[int]:
        if length is None:
            return [self.tokens(row)[-1], *self.drafts[row]]
        start = self.computed[row]
        return self.tokens(row)[start : start + length]

    def _inputs(self, rows: list[int], new: list[list[int]], num_decodes: int) -> StepInputs:
        ends = [self.computed[row] + len(ids) for row, ids in zip(rows, new, strict=True)]
        self._ends = dict(zip(rows, ends, strict=True))
        positions, slots = [], []
        for row, ids, end in zip(rows, new, ends, strict=True):
            for block in range(-(-end // BLOCK_SIZE)):
                if self.tables[0][row, block] == POISON_PAGE:
                    self.tables[0][row, block] = next(self._pages)
            own = range(end - len(ids), end)
            positions += own
            slots += [int(self.tables[0][row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in own]
        lengths = np.array([len(ids) for ids in new], dtype=np.int32)
        return StepInputs(
            token_ids=torch.tensor([token for ids in new for token in ids]),
            positions=torch.tensor(positions),
            query_starts=torch.tensor([0, *lengths.cumsum().tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            rows=torch.tensor(rows, dtype=torch.int32),
            groups=tuple(GroupInputs(table, torch.tensor(slots)) for table in self.tables),
            lengths=StepLengths(lengths, num_decodes, max(ends)),
        )


class NotingAttention(ReferenceAttention):
    """Notes what it is prepared for."""

    def __init__(self) -> None:
        self.prepared: list[StepInputs] = []

    def prepare(self, inputs: StepInputs) -> ReferenceStep:
        self.prepared.append(inputs)
        return super().prepare(inputs)


class Gathered(TorchFunctionMode):
    """Shapes of the indices that are gathered at."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.gather:
            self.shapes.append(tuple(args[2].shape))
        return func(*args, **(kwargs or {}))


def make_llama(folder: Path, seed: int, **changes: Any) -> transformers.LlamaForCausalLM:
    """A random checkpoint in `folder`, and Hugging Face's model of it."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | changes))).eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path, max_model_len: int = MAX_MODEL_LEN, placement: Placement = PLACEMENT) -> Decoder:
    with Checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint, read_options(read_config(folder)), placement, max_model_len)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_llama(folder, seed=3)
    return folder


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    make_llama(folder, seed=5, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Decoder:
    return load(target_folder)


@pytest.fixture(scope="session")
def hf_target(target_folder: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture
def greedy(hf_target: transformers.LlamaForCausalLM) -> Callable[[list[int], int], list[int]]:
    """The target's own continuation."""
    return lambda token_ids, length: continue_greedily(hf_target, token_ids, length)


@torch.inference_mode()
def continue_greedily(model: transformers.LlamaForCausalLM, token_ids: list[int], length: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, SHAPE["vocab_size"], length).tolist()


def hidden_states(model: transformers.LlamaForCausalLM, token_ids: list[int]) -> tuple[Tensor, ...]:
    """Streams entering each layer, then the last norm's output: each [num_tokens, hidden_size]."""
    with torch.inference_mode():
        output = model.model(torch.tensor([token_ids]), output_hidden_states=True)
    return tuple(hidden[0] for hidden in output.hidden_states)


def text_step(texts: dict[int, list[int]], num_proposals: int, salt: bytes | None = None) -> VerifiedStep:
    """A step after which the rows know these tokens, for proposers that look at nothing else."""
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = list(texts)
    token_ids = torch.zeros(MAX_NUM_SEQS, MAX_MODEL_LEN + 1, dtype=torch.int32)
    for row, tokens in texts.items():
        token_ids[row, : len(tokens)] = torch.tensor(tokens)
    return VerifiedStep(
        inputs=StepInputs(nothing, nothing, nothing, nothing, nothing, (), StepLengths(np.zeros(0, np.int32), 0, 0)),
        hidden=torch.zeros(0, 1),
        captured=(),
        sampled=torch.arange(len(rows)),
        rows=torch.tensor(rows),
        last_accepted=torch.arange(len(rows)),
        next_tokens=torch.tensor([tokens[-1] for tokens in texts.values()]),
        num_known=torch.tensor([len(tokens) for tokens in texts.values()]),
        num_slots=torch.zeros(len(rows), dtype=torch.int64),
        token_ids=token_ids,
        batch=BatchRows(
            np.array(rows), np.zeros(len(rows), dtype=np.bool_), np.array(rows), [(salt,) if salt else ()] * len(rows)
        ),
        block_copies=np.empty((0, 2), dtype=np.int32),
        num_proposals=num_proposals,
    )
