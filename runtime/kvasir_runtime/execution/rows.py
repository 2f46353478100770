"""What a rank keeps of the sequences in flight: tensors on the device, one row a sequence, changed by differences only.

A row's tokens, lengths and block tables are the truth about its sequence, drafts and tokens of steps under way
included: the scheduler names rows, and hears of the tokens when they have come back. Parameters of sampling are
written when a row is taken; the host keeps a row's traits in one number: what a step needs is known without asking the
device, and a step whose rows have no trait is one argmax.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.huge_pages import populate
from kvasir_runtime.kernels.inputs import RowTensors
from kvasir_runtime.kernels.sample import SamplingTensors
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork, Int32Array, NewSequence, StepPlan

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: dividing by less leaves the range of float32."""

POPULATED_AHEAD_BYTES = 256 * 1024**2
POPULATED_AT_ONCE_BYTES = 2 * 1024**2
"""What a request that comes meanwhile may wait for: one huge page."""


class Trait:
    """Bits; plain numbers, since an enum's cost numpy ten times as long."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 256
    PENALTIES = 8
    LOGIT_BIAS = 16
    MIN_TOKENS = 32
    NUCLEUS = 512
    """top_p without top_k: what it keeps depends on all tokens."""

    ADJUSTMENTS = PENALTIES | LOGIT_BIAS | MIN_TOKENS
    LISTS = LOGIT_BIAS | MIN_TOKENS


class SamplingRows:
    """`num_rows` rows; the tensors' first axis is the row."""

    def __init__(self, num_rows: int, vocab_size: int, transfers: Transfers) -> None:
        device = transfers.device
        self.vocab_size = vocab_size
        self._transfers = transfers
        self._floats = torch.ones((6, num_rows), device=device)
        self.inverse_temperature, self.top_p, self.log_min_p = self._floats[:3]
        """`inverse_temperature` is 0 of a greedy row."""
        self.presence_penalty, self.frequency_penalty, self.repetition_penalty = self._floats[3:]
        self._integers = torch.ones((2, num_rows), dtype=torch.int32, device=device)
        self.top_k, self.min_tokens = self._integers
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The bits of unsigned seeds."""
        self.stop_token_ids = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        """Kept from being sampled before min_tokens; a row's last is repeated to the width of the longest."""
        self.num_stop_ids = np.zeros(num_rows, dtype=np.int64)
        self.bias_token_ids = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        self.bias_values = torch.zeros((num_rows, 0), device=device)
        self.num_biases = np.zeros(num_rows, dtype=np.int64)
        self.traits = np.zeros(num_rows, dtype=np.uint16)
        self.wants_logprobs = np.zeros(num_rows, dtype=np.bool_)
        self.num_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.wants_prompt_logprobs = np.zeros(num_rows, dtype=np.bool_)
        self.num_prompt_logprobs = np.zeros(num_rows, dtype=np.int64)

    @property
    def _has_lists(self) -> bool:
        """Whether a row has one, or had one that is not forgotten yet."""
        return self.stop_token_ids.shape[1] + self.bias_token_ids.shape[1] > 0

    def traits_of(self, rows: Int32Array | Sequence[int]) -> int:
        """All that some of these rows need."""
        return int(np.bitwise_or.reduce(self.traits[rows]))

    def having(self, trait: int, rows: Int32Array) -> NDArray[np.bool_]:
        """Which of these rows have it."""
        return (self.traits[rows] & trait) > 0

    def write(self, rows: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
        """Take over the parameters of new sequences and forks."""
        for row, sampling in zip(rows, samplings, strict=True):
            self.traits[row] = _traits(sampling, self.vocab_size)
            self.wants_logprobs[row] = sampling.logprobs is not None
            self.num_logprobs[row] = sampling.logprobs or 0
            self.wants_prompt_logprobs[row] = sampling.prompt_logprobs is not None
            self.num_prompt_logprobs[row] = sampling.prompt_logprobs or 0
        index, floats, integers, seeds = self._transfers.upload(
            np.array(rows, dtype=np.int64),
            np.array([_floats(sampling) for sampling in samplings], dtype=np.float32).T,
            np.array(
                [(min(each.top_k or self.vocab_size, self.vocab_size), each.min_tokens) for each in samplings],
                dtype=np.int32,
            ).T,
            np.array([sampling.seed % 2**64 for sampling in samplings], dtype=np.uint64).view(np.int64),
        )
        self._floats[:, index] = floats
        self._integers[:, index] = integers
        self.seeds[index] = seeds
        if self._has_lists or self.traits_of(rows) & Trait.LISTS:
            self._write_lists(rows, samplings)

    def _write_lists(self, rows: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
        self._fit_widths(rows, samplings)
        for row, sampling in zip(rows, samplings, strict=True):
            if self.traits[row] & Trait.MIN_TOKENS:
                self._write_stop_tokens(row, self._known(sampling.stop_token_ids))
            if self.traits[row] & Trait.LOGIT_BIAS:
                self._write_bias(row, sampling.logit_bias)

    def _fit_widths(self, rows: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
        """To the longest lists that there are now: those that the rows held before are forgotten."""
        for row, sampling in zip(rows, samplings, strict=True):
            is_limited = self.traits[row] & Trait.MIN_TOKENS
            self.num_stop_ids[row] = len(self._known(sampling.stop_token_ids)) if is_limited else 0
            self.num_biases[row] = len(self._known(sampling.logit_bias))
        self.stop_token_ids = _resized(self.stop_token_ids, int(self.num_stop_ids.max()))
        self.bias_token_ids = _resized(self.bias_token_ids, int(self.num_biases.max()))
        self.bias_values = _resized(self.bias_values, int(self.num_biases.max()))

    def _write_stop_tokens(self, row: int, token_ids: list[int]) -> None:
        padded = _padded(token_ids, self.stop_token_ids.shape[1])
        (self.stop_token_ids[row],) = self._transfers.upload(np.array(padded, dtype=np.int64))

    def _write_bias(self, row: int, logit_bias: dict[int, float]) -> None:
        token_ids = self._known(logit_bias)
        padded = _padded(token_ids, self.bias_token_ids.shape[1])
        self.bias_token_ids[row], self.bias_values[row] = self._transfers.upload(
            np.array(padded, dtype=np.int64), np.array([logit_bias[token] for token in padded], dtype=np.float32)
        )

    def _known(self, token_ids: Sequence[int] | dict[int, float]) -> list[int]:
        """Ids outside the vocabulary can never be sampled, and must not be looked up."""
        return [token for token in token_ids if 0 <= token < self.vocab_size]


def _floats(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        1.0 / sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )


def _traits(sampling: SamplingParams, vocab_size: int) -> int:
    """Parameters of a greedy row that only shape a draw are no traits of it."""
    is_random = sampling.temperature >= MIN_TEMPERATURE
    has_top_k = sampling.top_k is not None and 0 < sampling.top_k < vocab_size
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    needed = {
        Trait.RANDOM: is_random,
        Trait.TOP_K: is_random and has_top_k,
        Trait.TOP_P: is_random and sampling.top_p < 1.0,
        Trait.NUCLEUS: is_random and sampling.top_p < 1.0 and not has_top_k,
        Trait.PENALTIES: any(penalties),
        Trait.LOGIT_BIAS: any(0 <= token < vocab_size for token in sampling.logit_bias),
        Trait.MIN_TOKENS: sampling.min_tokens > 0 and any(0 <= token < vocab_size for token in sampling.stop_token_ids),
    }
    return sum(trait for trait, is_needed in needed.items() if is_needed)


def _padded(token_ids: list[int], width: int) -> list[int]:
    """The last repeated: setting a logit twice to the same number changes nothing."""
    return token_ids + token_ids[-1:] * (width - len(token_ids))


def _resized(tensor: Tensor, width: int) -> Tensor:
    """The tensor with so many columns, new ones padded as rows are."""
    missing = width - tensor.shape[1]
    if missing <= 0:
        return tensor if missing == 0 else tensor[:, :width].clone()
    last = tensor[:, -1:] if tensor.shape[1] else tensor.new_zeros((tensor.shape[0], 1))
    return torch.cat((tensor, last.expand(-1, missing)), dim=1)


class Rows:
    """`max_num_seqs` rows; sequences of at most `max_model_len` tokens, and one that was drawn after the last."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        max_drafts: int,
        vocab_size: int,
        transfers: Transfers,
    ) -> None:
        device = transfers.device
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.token_ids = torch.zeros((max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        """What lies behind a row's known tokens has no meaning."""
        self._lengths = torch.zeros((3, max_num_seqs), dtype=torch.int32, device=device)
        self.num_known, self.num_computed, self.num_prompt_tokens = self._lengths
        self.block_tables = torch.zeros((num_groups, max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.drafts = torch.full((max_num_seqs, max_drafts), -1, dtype=torch.int32, device=device)
        """Guesses of the tokens after the known ones; -1 from where there is none."""
        self.sampling = SamplingRows(max_num_seqs, vocab_size, transfers)
        self.core_chooses = np.zeros(max_num_seqs, dtype=np.bool_)
        """Where it does not, the rank draws. On the host, as `num_candidates` and `prompt_lens` are."""
        self.num_candidates = np.zeros(max_num_seqs, dtype=np.int64)
        """See `NewSequence`."""
        self.prompt_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self.extra_keys: list[tuple[bytes, ...]] = [()] * max_num_seqs
        """See `RequestSpec`."""
        self.num_slots = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """Positions that each row's own blocks have room for; entries of its tables behind them are of whoever had the
        row before."""
        self.num_blocks_used = 0
        """Of the KV cache: the highest block that a row ever had, and those below."""
        self.version = 0
        """Grows whenever rows begin to be sampled in another way."""
        self.tensors = RowTensors(self.token_ids, self.num_computed, self.drafts, self.block_tables)
        self._transfers = transfers

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan changes, in its order."""
        if plan.added:
            self._add(plan.added)
        if plan.forks:
            self._fork(plan.forks)
        if len(plan.table_writes):
            self._write_tables(plan.table_writes)
        if len(plan.token_writes):
            self._write_tokens(plan.token_writes)

    def sampling_tensors(self) -> SamplingTensors:
        """What kernels read of how rows are sampled."""
        sampling = self.sampling
        return SamplingTensors(
            inverse_temperature=sampling.inverse_temperature,
            top_p=sampling.top_p,
            log_min_p=sampling.log_min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            top_k=sampling.top_k,
            min_tokens=sampling.min_tokens,
            seeds=sampling.seeds,
            num_stop_ids=torch.from_numpy(sampling.num_stop_ids),
            stop_ids=sampling.stop_token_ids,
            num_biases=torch.from_numpy(sampling.num_biases),
            bias_ids=sampling.bias_token_ids,
            biases=sampling.bias_values,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            drafts=self.drafts,
        )

    def take_returned(self, plan: StepPlan) -> None:
        """On a stage that draws nothing: the tokens that were drawn or chosen elsewhere, after which all but the last
        known token is computed, and the drafts."""
        returned = plan.returned
        if returned is None:
            return
        if len(returned.token_writes):
            self._write_tokens(returned.token_writes)
        if not len(returned.token_writes) and not len(plan.token_writes) and not returned.drafts.size:
            return
        written = np.concatenate((plan.token_writes[:, 0], returned.token_writes[:, 0])).astype(np.int64)
        decodes = plan.rows[: plan.num_decodes].astype(np.int64)
        drafts = np.ascontiguousarray(returned.drafts)
        written_rows, decoding_rows, own_drafts = self._transfers.upload(written, decodes, drafts)
        self.num_computed[written_rows] = self.num_known[written_rows] - 1
        if drafts.size:
            store_drafts(self, decoding_rows, own_drafts)

    def advance_unsampled(self, plan: StepPlan, seq_lens: Tensor) -> None:
        """Chunks that nothing is drawn after are computed; `seq_lens` int32 [num_requests] are the step's."""
        if plan.samples.all():
            return
        requests = np.flatnonzero(~plan.samples)
        index, rows = self._transfers.upload(requests, plan.rows[requests].astype(np.int64))
        self.num_computed[rows] = seq_lens[index]

    def _add(self, added: tuple[NewSequence, ...]) -> None:
        self.version += 1
        rows = [new.row for new in added]
        known = [np.array(new.token_ids, dtype=np.int32) for new in added]
        lengths = [
            [len(tokens), new.num_computed_tokens, new.spec.num_prompt_tokens]
            for new, tokens in zip(added, known, strict=True)
        ]
        index, state, token_ids = self._transfers.upload(
            np.array(rows, dtype=np.int64),
            np.array(lengths, dtype=np.int32).T,
            np.concatenate(known),
        )
        self._lengths[:, index] = state
        # Not `[index] = -1`: some versions of torch send the number from pageable memory, which waits for the device.
        self.drafts.index_fill_(0, index, -1)
        self.num_slots.index_fill_(0, index, 0)
        self.sampling.write(rows, [new.spec.sampling for new in added])
        start = 0
        for new, tokens in zip(added, known, strict=True):
            own = token_ids[start : start + len(tokens)]
            start += len(tokens)
            self.token_ids[new.row, : len(own)] = own
            self.num_candidates[new.row] = new.num_candidates
            self.core_chooses[new.row] = new.num_candidates > 0
            self.prompt_lens[new.row] = new.spec.num_prompt_tokens
            self.extra_keys[new.row] = new.spec.extra_keys

    def _fork(self, forks: tuple[Fork, ...]) -> None:
        """A gather is complete before what it is assigned to changes, so sources may be targets as well."""
        self.version += 1
        sources, targets = [fork.source_row for fork in forks], [fork.target_row for fork in forks]
        source, target = self._transfers.upload(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))
        self.token_ids[target] = self.token_ids[source]
        self._lengths[:, target] = self._lengths[:, source]
        self.block_tables[:, target] = self.block_tables[:, source]
        self.drafts[target] = self.drafts[source]
        # Its parent may go on to blocks that it does not share; writes will tell.
        self.num_slots.index_fill_(0, target, 0)
        self.num_candidates[targets] = self.num_candidates[sources]
        self.core_chooses[targets] = self.core_chooses[sources]
        self.prompt_lens[targets] = self.prompt_lens[sources]
        for row, keys in zip(targets, [self.extra_keys[row] for row in sources], strict=True):
            self.extra_keys[row] = keys
        self.sampling.write(targets, [fork.sampling for fork in forks])

    def _write_tables(self, writes: Int32Array) -> None:
        self.num_blocks_used = max(self.num_blocks_used, int(writes[:, 3].max()) + 1)
        (columns,) = self._transfers.upload(np.ascontiguousarray(writes.T))
        row, group, index, block_id = columns
        self.block_tables[group, row, index] = block_id
        self.num_slots.scatter_reduce_(0, row.long(), (index.long() + 1) * self.block_size, "amax")

    def _write_tokens(self, writes: Int32Array) -> None:
        """A row's writes come in the order of their positions: the last says how many tokens it knows."""
        last = np.array(list({int(row): line for line, row in enumerate(writes[:, 0])}.values()))
        columns, lasts = self._transfers.upload(np.ascontiguousarray(writes.T), last)
        row, position, token_id = columns
        self.token_ids[row, position] = token_id
        self.num_known[row[lasts]] = position[lasts] + 1


def store_drafts(rows: Rows, index: Tensor, drafts: Tensor) -> None:
    """Keep guesses int32 [n, num_proposals] of rows int64 [n]; columns beyond them hold none."""
    rows.drafts.index_fill_(0, index, -1)
    if drafts.shape[1]:
        rows.drafts[index, : drafts.shape[1]] = drafts


class PopulatedPages:
    """Has CPU memory found for KV pages before steps write to them, so that no step waits for it. Blocks are handed out
    in their order at first, so some ahead of the highest so far is enough, and what is never used is never taken. It is
    made up when half of it is used: not after each request, as another may come at once."""

    def __init__(self, buffer: Tensor, rows: Rows, populate: Callable[[Tensor], bool] = populate) -> None:
        """`buffer` uint8 [num_blocks, page_bytes]; `populate` says whether it could."""
        self._rows = rows
        self._populate = populate
        self._bytes = buffer.view(-1)
        self._page_bytes = buffer.shape[1]
        self._is_on_cpu = buffer.device.type == "cpu"
        self.forget()

    def forget(self) -> None:
        """None is there."""
        self._num_populated = 0 if self._is_on_cpu else self._bytes.nbytes
        self._is_filling = True

    def populate_next(self) -> bool:
        """One piece; to be called while there is no work. False: enough is there for now, or the kernel has none."""
        used = self._rows.num_blocks_used * self._page_bytes
        least = POPULATED_AHEAD_BYTES if self._is_filling else POPULATED_AHEAD_BYTES // 2
        self._is_filling = self._num_populated < min(used + least, self._bytes.nbytes)
        if not self._is_filling:
            return False
        end = min(self._num_populated + POPULATED_AT_ONCE_BYTES, self._bytes.nbytes)
        can = self._populate(self._bytes[self._num_populated : end])
        self._num_populated = end if can else self._bytes.nbytes
        return True
