"""A rank that is pure arithmetic, yet keeps what a real one keeps: rows by differences, and what every KV slot holds.

A slot holds the tokens up to its position. Reading one that was never written, or was written for other tokens, is an
assertion, so a scheduler that shares, frees or copies blocks wrongly cannot get away with it.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
from tests.runtime.scheduling.step_columns import columns

from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import Pooling
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Candidates, NewSequence, StepPlan, StepResult
from kvasir_runtime.transfer.commands import BlockIds

VOCAB_SIZE = 997
GARBAGE = (-1,)
"""In a slot that a failed step may have written."""

Slot = tuple[int, int]
"""Block id and offset in the block."""


def next_token(token_ids: list[int], seed: int = 0) -> int:
    """A chain that depends on everything before it, so that a lost or doubled token shows."""
    return (sum(token_ids) * 31 + len(token_ids) + 101 * seed) % VOCAB_SIZE


def continuation(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def candidates_after(token_ids: list[int], number: int) -> Candidates:
    """Of a beam: the tokens after the greedy one follow it, each less likely, at a rate that depends on the history."""
    first = next_token(token_ids)
    step = 0.1 + (sum(token_ids) % 7) / 10
    return Candidates([(first + i) % VOCAB_SIZE for i in range(number)], [-0.05 - step * i for i in range(number)])


@dataclass
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    num_candidates: int
    sampling: SamplingParams
    tables: list[dict[int, int]]
    drafts: list[int] = field(default_factory=list)
    pooling: Pooling | None = None
    summed: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of the tokens computed since it took its row: what is made of a prompt that wants a vector."""

    def pool(self, end: int) -> None:
        """The tokens up to there are computed."""
        pooled = self.token_ids[self.num_computed : end]
        self.summed = [self.summed[0] + sum(pooled), self.summed[1] + len(pooled)]
        self.num_computed = end


@dataclass
class FakeRank:
    block_size: int
    groups: tuple[KvGroup, ...]
    wrong_drafts: int = 0
    """Every so-many-th draft is wrong; 0: all are right."""
    missing_drafts: int = 0
    """Every so-many-th time one draft fewer is found than was asked for; 0: never."""
    draws_by_seed: bool = False
    """Whether sequences of equal tokens draw different ones, by their seeds."""
    num_blocks: int | None = None
    """None: any block id is taken."""
    tells_drafts: bool = False
    """As the last pipeline stage does."""
    last_computed: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """Of the last step, by row: the first position, and the tokens."""
    rows: dict[int, Row] = field(default_factory=dict)
    slots: dict[Slot, tuple[int, ...]] = field(default_factory=dict)
    num_proposed: int = 0
    num_proposals: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        lengths = self._write(plan)
        for row, length in lengths.items():
            self._read(self.rows[row], length)
        return self._result(plan, lengths)

    def fail(self, plan: StepPlan) -> None:
        """Break off in the middle of a step, which leaves garbage wherever it was to write."""
        self._apply(plan)
        before, self.slots = self.slots, {}
        self._write(plan)
        copied = [(target, offset) for _, target in plan.block_copies.tolist() for offset in range(self.block_size)]
        self.slots = before | dict.fromkeys([*self.slots, *copied], GARBAGE)

    def read_into(self, block_ids: BlockIds, index: int, token_ids: list[int] | None) -> None:
        """What a connector reads into these pages: block `index` of the tokens, None: anything else."""
        for block_id in block_ids:
            for offset in range(0 if block_id is None else self.block_size):
                end = index * self.block_size + offset + 1
                self.slots[block_id, offset] = GARBAGE if token_ids is None else tuple(token_ids[:end])

    def _apply(self, plan: StepPlan) -> None:
        for new in plan.added:
            self.rows[new.row] = self._new_row(new)
        copies = {
            fork.target_row: replace(deepcopy(self.rows[fork.source_row]), sampling=fork.sampling)
            for fork in plan.forks
        }
        assert len(copies) == len(plan.forks), "a row is the target of one fork a step"
        self.rows.update(copies)
        for row, group, index, block in plan.table_writes.tolist():
            assert self.num_blocks is None or 0 <= block < self.num_blocks
            self.rows[row].tables[group][index] = block
        for row, position, token in plan.token_writes.tolist():
            tokens = self.rows[row].token_ids
            assert position == len(tokens), "a token is written behind the last known one"
            tokens.append(token)
        for source, target in plan.block_copies.tolist():
            for offset in range(self.block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]

    def _new_row(self, new: NewSequence) -> Row:
        return Row(
            list(new.token_ids), new.spec.num_prompt_tokens, new.num_computed_tokens, new.num_candidates,
            new.spec.sampling, [{} for _ in self.groups], pooling=new.spec.pooling,
        )  # fmt: skip

    def _write(self, plan: StepPlan) -> dict[int, int]:
        """Row -> tokens computed."""
        lengths: dict[int, int] = {}
        self.last_computed = {}
        written: set[Slot] = set()
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row is computed once a step"
        for index, row_number in enumerate(plan.rows.tolist()):
            row, length = self.rows[row_number], int(plan.num_new_tokens[index])
            assert length > 0, "a row of a step computes something"
            if index < plan.num_decodes:
                assert row.num_computed == len(row.token_ids) - 1, "a decode computes its last known token"
                assert plan.starts[index] >= row.num_computed, "a decode's start is the highest that is possible"
                row.drafts = row.drafts[: length - 1]
                length = 1 + len(row.drafts)
            else:
                assert plan.starts[index] == row.num_computed, "a chunk begins where the one before ended"
                assert row.num_computed + length <= len(row.token_ids), "computed a token that nobody knows"
                row.drafts = []
            history = row.token_ids + row.drafts
            self.last_computed[row_number] = row.num_computed, history[row.num_computed : row.num_computed + length]
            for position, slot in self._slots_of(row, length):
                assert slot not in written, "two sequences write one slot in a step"
                written.add(slot)
                self.slots[slot] = tuple(history[: position + 1])
            lengths[row_number] = length
        return lengths

    def _slots_of(self, row: Row, length: int) -> Iterator[tuple[int, Slot]]:
        """(position, slot) of the next tokens, in every group."""
        for position in range(row.num_computed, row.num_computed + length):
            for table in row.tables:
                yield position, (table[position // self.block_size], position % self.block_size)

    def _read(self, row: Row, length: int) -> None:
        history = row.token_ids + row.drafts
        last = row.num_computed + length
        for group, table in zip(self.groups, row.tables, strict=True):
            first = group.reach.first_seen(row.num_computed)
            for position in range(first, last):
                held = self.slots.get((table[position // self.block_size], position % self.block_size))
                assert held == tuple(history[: position + 1]), (
                    f"slot of position {position}, {group.reach}: holds {held}, not {history[: position + 1]}"
                )

    def _result(self, plan: StepPlan, lengths: dict[int, int]) -> StepResult:
        lines: list[list[int]] = []
        num_drafts: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        candidates: dict[int, Candidates] = {}
        pooled: dict[int, list[float]] = {}
        result_lines: dict[int, int] = {}
        for index, number in enumerate(plan.rows.tolist()):
            row, samples = self.rows[number], bool(plan.samples[index])
            end = row.num_computed + lengths[number]
            if row.sampling.prompt_logprobs is not None and row.num_computed < row.num_prompt_tokens - 1:
                prompt_logprobs[number] = _prompt_scores(row, end)
            if row.pooling is not None:
                assert not samples, "nothing is drawn behind a prompt that wants a vector"
                row.pool(end)
                if end == row.num_prompt_tokens:
                    pooled[number] = row.summed
                continue
            assert samples == (end >= len(row.token_ids)), "samples exactly when the last known token is computed"
            if not samples:
                row.num_computed = end
            elif row.num_candidates:
                candidates[number] = candidates_after(row.token_ids, row.num_candidates)
                row.num_computed = end
                lines.append([])
                num_drafts.append(0)
            else:
                num_drafts.append(len(row.drafts))
                lines.append(self._verify(row))
                row.drafts = self._propose(row, plan.num_proposals)
                if row.sampling.logprobs is not None:
                    result_lines[number] = len(lines) - 1
                    logprobs[number] = [TokenLogprobs([token], [0.0], 1) for token in lines[-1]]
        width = 1 + max(num_drafts, default=0)
        padded = [line + [-7] * (width - len(line)) for line in lines]
        return StepResult(
            np.array(padded, dtype=np.int32).reshape(len(lines), width),
            np.array([len(line) for line in lines], dtype=np.int32),
            np.array(num_drafts, dtype=np.int32),
            columns(logprobs, prompt_logprobs, candidates, lines=result_lines, pooled=pooled),
            drafts=self._drafts(plan) if self.tells_drafts else None,
        )

    def _drafts(self, plan: StepPlan) -> np.ndarray:
        drafts = [self.rows[row].drafts for row in plan.rows[plan.samples].tolist()]
        padded = [(own + [-1] * plan.num_proposals)[: plan.num_proposals] for own in drafts]
        return np.array(padded, dtype=np.int32).reshape(len(drafts), plan.num_proposals)

    def _seed(self, row: Row) -> int:
        return row.sampling.seed if self.draws_by_seed else 0

    def _verify(self, row: Row) -> list[int]:
        line: list[int] = []
        for draft in [*row.drafts, None]:
            token = next_token(row.token_ids, self._seed(row))
            row.token_ids.append(token)
            line.append(token)
            if token != draft:
                break
        row.num_computed = len(row.token_ids) - 1
        return line

    def _propose(self, row: Row, number: int) -> list[int]:
        self.num_proposals += 1
        if number and self.missing_drafts and self.num_proposals % self.missing_drafts == 0:
            number -= 1
        drafts = continuation(row.token_ids, number, self._seed(row))
        for index in range(number):
            self.num_proposed += 1
            if self.wrong_drafts and self.num_proposed % self.wrong_drafts == 0:
                drafts[index] = (drafts[index] + 1) % VOCAB_SIZE
        return drafts


def _prompt_scores(row: Row, end: int) -> list[TokenLogprobs]:
    """Of the prompt tokens after those computed in a step, told apart by their positions."""
    last = min(end, row.num_prompt_tokens - 1)
    return [TokenLogprobs([row.token_ids[at + 1]], [-float(at)], 1) for at in range(row.num_computed, last)]
