"""The step contract: what bounds a step, what the scheduler plans for it, and what the ranks make of it.

A plan is differences only. Ranks keep a row of device state for every running sequence (tokens, how far they are
computed, block tables, sampling parameters) and apply a plan in field order: add, fork, write tables and tokens, copy
blocks, then compute. Planning is no commitment: a rank's row, not the plan, says where a decode starts, because the
tokens of steps under way are known on the device first. Numpy; no torch here.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
Rows = NDArray[np.int64]
"""Row numbers, or one number for each of some rows."""
Counts = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that takes a row: new, or preempted and back. Whatever the row held before is forgotten."""

    row: int
    spec: RequestSpec
    """Its request's, with the sequence's own seed."""
    output_token_ids: list[int]
    """Sampled so far."""
    num_computed_tokens: int
    """Found in the prefix cache; the sequence's first chunk starts here."""
    num_candidates: int = 0
    """So many most likely tokens are reported, for the core to choose, instead of one being drawn; 0 draws."""

    @property
    def token_ids(self) -> list[int]:
        """Everything known."""
        prompt = self.spec.prompt_token_ids
        return [*prompt, *self.output_token_ids] if self.output_token_ids else prompt


@dataclass(frozen=True, slots=True)
class Fork:
    """`target_row` becomes a copy of `source_row` (tokens, tables, counts), drawing by `sampling` from now on.

    All forks of a plan happen at once: every source is read before any target is written.
    """

    source_row: int
    target_row: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedTokens:
    """What the last pipeline stage has drawn since for a plan's decodes. The stages before it hear of it from the plan,
    which waits for these tokens anyway: a way back between stages would save no time."""

    token_writes: Int32Array  # [m, 3]: row, position, token id; the row then knows position + 1 tokens
    drafts: Int32Array  # [num_decodes, most drafts of one], -1 from where there is none


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One step. The decodes come first, then the prefill chunks.

    A struct, since one is made each step, and a frozen dataclass is slow to make.
    """

    number: int
    added: tuple[NewSequence, ...]
    forks: tuple[Fork, ...]
    table_writes: Int32Array  # [m, 4]: row, KV group, index in the row's table of that group, block id
    token_writes: Int32Array  # [m, 3]: row, position, token id; the row then knows position + 1 tokens
    block_copies: Int32Array  # [m, 2]: source and target block id, before anything is computed, in order
    rows: Int32Array  # [num_requests]
    num_decodes: int
    """So many of `rows`, the first ones, compute their last known token and the drafts after it."""
    num_new_tokens: Int32Array  # [num_requests], drafts included
    starts: Int32Array  # [num_requests], first position computed; of a decode with steps under way the highest possible
    samples: BoolArray  # [num_requests], whether logits after the last token (and each draft) are wanted
    num_proposals: int = 0
    """Drafts to propose after this step for every sequence that sampled; 0: the proposer is not shown the step."""
    returned: ReturnedTokens | None = None
    """None where one stage computes all layers."""
    num_failures: int = 0
    """Steps known to have failed when this one was planned: it builds on none of them, those planned before may."""

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum())


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely next tokens of a row, the most likely first, with natural-log probabilities."""

    token_ids: list[int]
    logprobs: list[float]


LOGPROBS, PROMPT_LOGPROBS, CANDIDATES, GRAMMAR = "logprobs", "prompt_logprobs", "candidates", "grammar"
POOLED = "pooled"
"""Step features whose columns the core reads."""

Columns = dict[str, NDArray[Any]]
"""Equally long arrays by name."""


class StepTimes(msgspec.Struct, frozen=True):
    """What a step took, and whether steps like it take as long."""

    processor_seconds: float | None = None
    """That the step took of its thread, on a CPU: unlike the clock it does not count what else the machine does. None
    on other devices."""
    is_warming_up: bool = False
    """Whether it ran without a graph, or captured one, so that steps like it will be faster."""


class StepResult(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Tokens of the plan's requests that sample, in the plan's order; a line is empty (`num_accepted` 0) where the core
    chooses."""

    token_ids: Int32Array  # [num_sampled, 1 + most drafts]
    num_accepted: Int32Array  # [num_sampled], how many of a line's tokens hold: the accepted drafts and one more
    num_drafts: Int32Array  # [num_sampled], drafts that were there to verify
    columns: dict[str, Columns] = {}
    """Step feature -> what else the step brought for the rows that want it; the properties below read them."""
    times: StepTimes = StepTimes()
    drafts: Int32Array | None = None  # [num_sampled, num_proposals], for the next step; None: nobody has to be told

    @cached_property
    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Row -> one entry for each accepted token, where asked for."""
        columns = self.columns.get(LOGPROBS)
        if columns is None:
            return {}
        return _entries(columns, columns["offsets"] < self.num_accepted[columns["lines"]])

    @cached_property
    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Row -> one entry for each prompt token scored in this step (prompt tokens 1.. in order over the chunks)."""
        columns = self.columns.get(PROMPT_LOGPROBS)
        return {} if columns is None else _entries(columns, np.ones(len(columns["rows"]), dtype=np.bool_))

    @cached_property
    def pooled(self) -> dict[int, bytes]:
        """Row -> the vector of its prompt, little-endian float32, where it was asked for and all is computed."""
        columns = self.columns.get(POOLED)
        if columns is None:
            return {}
        vectors = columns["vectors"].astype("<f4")
        return {row: vector.tobytes() for row, vector in zip(columns["rows"].tolist(), vectors, strict=True)}

    @property
    def strayed_rows(self) -> list[int]:
        """Rows whose answers do not follow their grammars."""
        columns = self.columns.get(GRAMMAR)
        return [] if columns is None else columns["rows"].tolist()

    @cached_property
    def candidates(self) -> dict[int, Candidates]:
        """Row -> its candidates, where the core chooses."""
        columns = self.columns.get(CANDIDATES)
        if columns is None:
            return {}
        lists = (columns[name].tolist() for name in ("rows", "numbers", "token_ids", "logprobs"))
        return {row: Candidates(ids[:number], values[:number]) for row, number, ids, values in zip(*lists, strict=True)}


def _entries(columns: Columns, which: BoolArray) -> dict[int, list[TokenLogprobs]]:
    """Of those lines, by row."""
    by_row: dict[int, list[TokenLogprobs]] = {}
    lists = (columns[name][which].tolist() for name in ("rows", "numbers", "token_ids", "logprobs", "ranks"))
    for row, number, ids, values, rank in zip(*lists, strict=True):
        by_row.setdefault(row, []).append(TokenLogprobs(ids[: 1 + number], values[: 1 + number], rank))
    return by_row


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """What a step took, and of what."""

    num_decodes: int
    num_prompt_tokens: int
    num_asked: int
    """Drafts to be verified, of all requests."""
    num_accepted: int
    """Of them, those that held."""
    num_proposals: int
    """A request, for the next step."""
    seconds: float
    """Planning and sending out included. On a CPU of the threads that work: see `StepResult.processor_seconds`."""
    clock_seconds: float
    """The same as it passed for those who wait."""
    is_warming_up: bool = False


HALF_LIFE_SECONDS = 1.0
"""Of work: chunks follow soon when the machine gets busy, or prompts long."""
UNMEASURED_TOKENS = 256
"""Of the first chunk beside decodes, where no prompt was measured before."""
LEAST_SHARE = 2.0
"""Of a step's time that prompts get, as a multiple of what its decodes take alone: where those take long by themselves,
streams are slowed down threefold rather than prompts kept waiting many times as long."""
FINISHING_SHARE = 2.0
"""How many times as long a step may take that leaves no prompt waiting, where more wait for that than for the step. The
rest in a step of its own would have the weights read once more."""


class DecayingRate:
    """So much a second, recent seconds counting more."""

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """None before anything was observed."""
        return self._amount / self._seconds if self._seconds else None

    def observe(self, amount: float, seconds: float) -> None:
        weight = 0.5 ** (seconds / self._half_life_seconds)
        self._amount = self._amount * weight + amount
        self._seconds = self._seconds * weight + seconds


class StepBudget:
    """How many tokens of prompts a step may compute, such that nobody who decodes in it waits for long.

    While nobody decodes that is the whole token budget. Else a step aims at a time, by what steps of decodes alone and
    tokens of prompts took of late.
    """

    def __init__(self, max_num_batched_tokens: int, max_step_seconds: float, block_size: int) -> None:
        self._most = max_num_batched_tokens
        self._max_step_seconds = max_step_seconds
        self._block_size = block_size
        self._decodes: defaultdict[int, DecayingRate] = defaultdict(lambda: DecayingRate(HALF_LIFE_SECONDS))
        """Steps a second, of decodes alone; by how often their number doubles."""
        self._prompts = DecayingRate(HALF_LIFE_SECONDS)
        """Tokens a second, beyond what the decodes of the same steps would have taken alone."""

    def num_prompt_tokens(self, num_decodes: int, num_prompts: int, num_left: int) -> int:
        """Tokens of prompts that a step may compute beside so many decodes, where so many prompts wait and have
        `num_left` tokens left to compute: all of those, or whole blocks, one at least."""
        if not num_decodes:
            return self._most
        rate, decode_seconds = self._prompts.value, self._decode_seconds(num_decodes)
        seconds = max(self._max_step_seconds - decode_seconds, LEAST_SHARE * decode_seconds)
        num_tokens = UNMEASURED_TOKENS if rate is None else int(seconds * rate)
        if num_prompts > num_decodes and num_tokens < num_left <= FINISHING_SHARE * num_tokens:
            return min(self._most, num_left)
        return min(self._most, max(1, num_tokens // self._block_size) * self._block_size)

    def observe_step(self, step: TimedStep) -> None:
        if step.is_warming_up or step.clock_seconds <= 0:
            return
        if not step.num_prompt_tokens:
            self._decodes[step.num_decodes.bit_length()].observe(1, step.clock_seconds)
            return
        least = step.clock_seconds / 2  # what decodes took before may say too much
        seconds = max(least, step.clock_seconds - self._decode_seconds(step.num_decodes))
        self._prompts.observe(step.num_prompt_tokens, seconds)

    def _decode_seconds(self, num_decodes: int) -> float:
        """0 where nothing like it was measured."""
        rate = self._decodes[num_decodes.bit_length()].value if num_decodes else None
        return 1 / rate if rate else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    """Sequences in one step."""
    max_num_batched_tokens: int
    """Token budget of one step."""
    max_model_len: int
    """Tokens of prompt and output."""
    num_stages: int = 1
    """Pipeline stages: so many steps may be under way, and with more than one no sequence decodes in two of them."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be spread over steps."""
    step_budget: StepBudget | None = None
    """Of tokens of prompts, by time; None: as many as max_num_batched_tokens leaves."""


class DraftDepth(Protocol):
    """How many drafts are worth verifying (speculative/depth.py)."""

    @property
    def max_depth(self) -> int:
        """The most that it ever says."""

    def depths(self, rows: Counts) -> Counts:
        """For each row, were they a batch. Asked once or twice a step."""

    def observe(self, rows: Counts, num_asked: Counts, num_accepted: Counts) -> None:
        """How many drafts a step was planned to verify for each row, and how many of them held. Not called for a step
        without any."""

    def forget(self, row: int) -> None:
        """The row has another occupant."""
