"""A pipeline stage before the last, as the scheduler's plans make it: tokens by row, and no model.

It draws nothing and is never told a result, so what it would compute shows what the plans tell it.
"""

from copy import copy
from dataclasses import dataclass, field

from kvasir_runtime.scheduling.step import StepPlan

ComputedTokens = tuple[int, list[int]]
"""Position of the first, and the tokens."""


@dataclass
class StageRow:
    token_ids: list[int]
    num_computed: int
    drafts: list[int] = field(default_factory=list)


@dataclass
class FakeEarlierStage:
    rows: dict[int, StageRow] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> dict[int, ComputedTokens]:
        """What the step computes of each row."""
        self._apply(plan)
        computed: dict[int, ComputedTokens] = {}
        for index, number in enumerate(plan.rows.tolist()):
            row, length = self.rows[number], int(plan.num_new_tokens[index])
            is_decode = index < plan.num_decodes
            history = row.token_ids + (row.drafts[: length - 1] if is_decode else [])
            computed[number] = (row.num_computed, history[row.num_computed : row.num_computed + length])
            if not plan.samples[index]:
                row.num_computed += length
        return computed

    def _apply(self, plan: StepPlan) -> None:
        assert plan.returned is not None
        for new in plan.added:
            self.rows[new.row] = StageRow(list(new.token_ids), new.num_computed_tokens)
        copies = {
            fork.target_row: StageRow(list(source.token_ids), source.num_computed, copy(source.drafts))
            for fork in plan.forks
            for source in [self.rows[fork.source_row]]
        }
        self.rows.update(copies)
        for number, position, token in [*plan.token_writes.tolist(), *plan.returned.token_writes.tolist()]:
            row = self.rows[number]
            assert position == len(row.token_ids), "a token is written behind the last known one"
            row.token_ids.append(token)
            row.num_computed = position
        for number, drafts in zip(plan.rows[: plan.num_decodes].tolist(), plan.returned.drafts.tolist(), strict=True):
            self.rows[number].drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
