"""Lets sequences draw only what their grammars allow.

Each rank that draws follows its sequences' grammars itself, by the tokens in its rows: so nothing waits for the core,
however many steps are ahead of it, and a sequence that comes back after preemption, or from another engine, is where
its tokens have brought it. Masks are filled while the device computes the step's decoder.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.errors import GrammarError, KvasirRuntimeError
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, StepFeature, TensorColumns
from kvasir_runtime.execution.transfers import Download, Transfers
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import GRAMMAR, StepPlan
from kvasir_runtime.structured.vocabulary import ALL_ALLOWED, Matcher, Vocabulary, mask_of, num_words

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Followed:
    """A row's grammar. Without a matcher it could not be followed, or its answer has ended: all tokens are allowed."""

    matcher: Matcher | None
    num_known: int
    """Tokens of the row that the matcher has seen, those of the prompt included."""
    num_outputs: int
    """Among them."""
    sampling: SamplingParams
    stop_words: NDArray[np.int32]
    """Of the tokens that end it, as in a mask."""
    is_broken: bool = False

    def accept(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.num_known, self.num_outputs = self.num_known + 1, self.num_outputs + 1
            if self.matcher is None:
                continue
            if self.matcher.num_valid([token_id]):
                self.matcher.accept([token_id])
            else:  # behind the end: of a step planned before anybody knew of it, or of a client that ignores it
                self.is_broken |= token_id not in self.sampling.stop_token_ids and not self.matcher.is_complete
                self.matcher = None

    def fill(self, lines: NDArray[np.int32], drafts: list[int]) -> int:
        """What may be drawn now, and behind each of the drafts that may be; how many those are."""
        lines[:] = ALL_ALLOWED
        if self.matcher is None:
            return len(drafts)
        valid = drafts[: self.matcher.num_valid([token_id for token_id in drafts if token_id >= 0])]
        matcher = self.matcher.copy() if valid else self.matcher
        for number, line in enumerate(lines[: len(valid) + 1]):
            if number:
                draft = valid[number - 1]
                if not _allows(lines[number - 1], draft):  # how long a thought may be is told by masks alone
                    return number - 1
                matcher.accept([draft])
            self._fill_line(matcher, line, self.num_outputs + number)
        return len(valid)

    def _fill_line(self, matcher: Matcher, line: NDArray[np.int32], num_outputs: int) -> None:
        """A grammar that can only end does so before min_tokens as well."""
        may_end, is_early = matcher.fill(line), num_outputs < self.sampling.min_tokens
        going_on = line & ~self.stop_words if is_early else line
        if may_end and not (is_early and going_on.any()):
            line |= self.stop_words
        elif going_on.any():
            line[:] = going_on
        if not line.any():
            line[:] = ALL_ALLOWED  # complete, and nothing may end it: what follows is the client's wish


class GrammarMask(StepFeature):
    name = GRAMMAR
    asked_by = attrgetter("grammar")

    def __init__(self, rows: Rows, transfers: Transfers, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is asked for when the first grammar comes."""
        self._rows = rows
        self._transfers = transfers
        self._vocabulary = vocabulary
        self._num_words = num_words(rows.sampling.vocab_size)
        self.wants = np.zeros(len(rows.prompt_lens), dtype=np.bool_)
        self._followed: dict[int, Followed] = {}
        """By row, until another sequence takes it."""
        self._asked: list[int] = []
        """Rows that the step under way draws for."""
        self._download: Download | None = None

    def on_rows(self, plan: StepPlan) -> None:
        for new in plan.added:
            self._followed.pop(new.row, None)
            if new.spec.grammar is not None:
                self._followed[new.row] = self._begin(new.spec.grammar, new.spec.sampling, new.output_token_ids)
                self._followed[new.row].num_known = len(new.token_ids)
        copies = {fork.target_row: self._copy(fork.source_row, fork.sampling) for fork in plan.forks}
        for row, copy in copies.items():
            self._followed.pop(row, None)
            if copy is not None:
                self._followed[row] = copy
        taken = [new.row for new in plan.added] + list(copies)
        self.wants[taken] = [row in self._followed for row in taken]
        limited = [row for row in taken if self.wants[row]]
        if limited:  # a grammar may end before min_tokens, so its mask sees to both
            (index,) = self._transfers.upload(np.array(limited, dtype=np.int64))
            self._rows.sampling.min_tokens.index_fill_(0, index, 0)

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        """Fetch what was drawn since, and the drafts, before the step's own kernels."""
        self._download = None  # of a step that failed
        sampled = plan.rows[plan.samples].tolist()
        self._asked = [row for row in sampled if row in self._followed]
        if self._asked:
            rows = self._rows
            seen = np.array([[row, self._followed[row].num_known] for row in self._asked], dtype=np.int64).T
            index, first = self._transfers.upload(np.ascontiguousarray(seen))[0]
            width = torch.arange(1 + rows.drafts.shape[1], device=index.device)
            columns = (first.unsqueeze(1) + width).clamp_(max=rows.token_ids.shape[1] - 1)
            token_ids = rows.token_ids[index.unsqueeze(1), columns]
            self._download = self._transfers.download([rows.num_known[index], token_ids, rows.drafts[index]])
        return None

    def mask(self, step: ForwardedStep) -> NDArray[np.int32] | None:
        if self._download is None:
            return None
        arrived, self._download = self._download.arrays(), None
        arrays = {row: columns for row, *columns in zip(self._asked, *arrived, strict=True)}
        positions = step.positions
        masks = np.full((positions.num_positions, self._num_words), ALL_ALLOWED)
        firsts = np.searchsorted(positions.host_sequences, np.arange(len(positions.host_rows) + 1))
        cuts = []
        for number, row in enumerate(positions.host_rows.tolist()):
            if row in arrays:
                lines = masks[firsts[number] : firsts[number + 1]]
                num_known, token_ids, drafts = arrays[row]
                followed, own = self._followed[row], drafts[: len(lines) - 1].tolist()
                num_allowed = self._fill(followed, lines, token_ids[: num_known - followed.num_known].tolist(), own)
                if num_allowed < len(own):
                    cuts.append((row, num_allowed))
        self._cut_drafts(cuts)
        return masks

    def _cut_drafts(self, cuts: list[tuple[int, int]]) -> None:
        """From the first that may not be: what a grammar forbids was never proposed."""
        if cuts:
            index, first = self._transfers.upload(np.array(cuts, dtype=np.int64).T.copy())[0]
            drafts = self._rows.drafts[index]
            column = torch.arange(drafts.shape[1], device=drafts.device)
            self._rows.drafts[index] = drafts.masked_fill(column >= first.unsqueeze(1), -1)

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """The rows whose answers do not follow their grammars."""
        broken = [row for row in self._asked if self._followed[row].is_broken]
        return {"rows": np.array(broken, dtype=np.int32)} if broken else None

    def _begin(self, grammar: str, sampling: SamplingParams, output_token_ids: list[int]) -> Followed:
        stop_words = mask_of(sampling.stop_token_ids, self._rows.sampling.vocab_size)
        followed = Followed(None, 0, 0, sampling, stop_words)
        try:
            followed.matcher = self._vocabulary().matcher(grammar)
            followed.accept(output_token_ids)
        except KvasirRuntimeError as error:
            _give_up(followed, error)
        return followed

    def _copy(self, row: int, sampling: SamplingParams) -> Followed | None:
        source = self._followed.get(row)
        if source is None:
            return None
        matcher = None if source.matcher is None else source.matcher.copy()
        return replace(source, matcher=matcher, sampling=sampling)

    def _fill(self, followed: Followed, lines: NDArray[np.int32], new_tokens: list[int], drafts: list[int]) -> int:
        try:
            followed.accept(new_tokens)
            return followed.fill(lines, drafts)
        except GrammarError as error:
            _give_up(followed, error)
            lines[:] = ALL_ALLOWED
            return len(drafts)


def _allows(line: NDArray[np.int32], token_id: int) -> bool:
    return bool(line.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1)


def _give_up(followed: Followed, error: KvasirRuntimeError) -> None:
    logger.warning("a grammar cannot be followed, its request fails: %s", error)
    followed.matcher, followed.is_broken = None, True
