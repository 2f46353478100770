"""Computes a rank's steps: rows, inputs, decoder, logits of the positions that matter, draws, drafts, results.

Steps run strictly in order on one thread. Tokens that are drawn stay in the rows, so later steps may compute them
before the scheduler has seen them; their results are read whenever the reader comes to it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS, AttentionBackend, LayerCache, StepInputs
from kvasir_runtime.execution.kv_buffer import copy_blocks
from kvasir_runtime.execution.kv_memory import KvMemory
from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.rows import Rows, store_drafts
from kvasir_runtime.execution.sampler import draw, takes_most_likely
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, PendingResult, StepFeature, StepFeatures
from kvasir_runtime.execution.step_inputs import SampledPositions, SampledPositionsBuilder, StepInputBuilder
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.sample import DrawnPositions, KnownTokens, VerifiedTokens
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.models.decoder import ComputeStep, Decoder, DecoderOutput
from kvasir_runtime.parallel.collectives import Collectives, SingleRank
from kvasir_runtime.scheduling.step import BoolArray, StepPlan, StepTimes
from kvasir_runtime.speculative.proposer import BatchRows, Proposer, VerifiedStep


@dataclass(frozen=True, slots=True)
class EagerDecoder:
    """Runs the decoder kernel by kernel."""

    decoder: Decoder
    backend: AttentionBackend
    caches: Sequence[LayerCache]
    captured_layers: tuple[int, ...]
    """Of all pipeline stages."""

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        captured_layers = self.captured_layers if captures else ()
        return self.decoder(inputs.token_ids, self.backend.prepare(inputs), self.caches, kept_tokens, captured_layers)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step between the decoder and the draws."""

    step: ForwardedStep
    features: tuple[StepFeature, ...]
    """That some of its rows want."""
    output: DecoderOutput
    sampled_hidden: Tensor  # [num_positions, hidden_size]
    seconds: float
    """Processor time of its thread."""


class ModelRunner:
    """Owns the rows of one rank, and writes its KV buffer uint8 [num_blocks, page_bytes]."""

    def __init__(
        self,
        *,
        rows: Rows,
        buffer: Tensor,
        compute: ComputeStep,
        to_logits: Callable[[Tensor], Tensor],
        ops: StepOps,
        proposer: Proposer | None,
        max_num_batched_tokens: int,
        transfers: Transfers,
        features: Sequence[StepFeature] = (),
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        tensor: Collectives | None = None,
        kv_memory: KvMemory | None = None,
        take_warming_up: Callable[[], bool] | None = None,
    ) -> None:
        """`extras` are the features' buffers; `take_warming_up` as of `RunnerGraphs`."""
        self._rows = rows
        self._buffer = buffer
        self._compute = compute
        self._to_logits = to_logits
        self._ops = ops
        self._proposer = proposer
        self._transfers = transfers
        self._tensor = SingleRank() if tensor is None else tensor
        self._kv_memory = KvMemory(buffer) if kv_memory is None else kv_memory
        self._take_warming_up = take_warming_up
        self._inputs = StepInputBuilder(rows, ops.prepare_inputs, max_num_batched_tokens, transfers, extras)
        self._positions = SampledPositionsBuilder(rows, transfers)
        self._known = KnownTokens(rows.token_ids, rows.num_known, rows.num_computed, rows.drafts)
        self._features = StepFeatures(features, rows)
        self._forwarded: Forwarded | None = None
        self._was_shown = np.zeros(len(rows.num_slots), dtype=np.bool_)
        """Of each row, whether the proposer has seen its last step."""

    @property
    def kv_buffer(self) -> Tensor:
        return self._buffer

    @property
    def kv_memory(self) -> KvMemory:
        return self._kv_memory

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Take over the plan's differences and compute its tokens. `sample` follows, before the next step."""
        self._forwarded, start = None, time.thread_time()
        self._rows.apply(plan)
        self._features.on_rows(plan)
        if len(plan.block_copies):
            copy_blocks(self._buffer, plan.block_copies)
        inputs = self._inputs.build(plan)
        positions = self._positions.build(plan, inputs.lengths.query_lens)
        step = ForwardedStep(plan, inputs, positions)
        features = self._features.wanted(plan)
        wanted = _wanted_tokens(features, plan, inputs) if features else {}
        is_proposing = self._proposer is not None and plan.num_proposals > 0
        kept = self._kept_tokens(step, wanted, is_proposing)
        output = self._compute(inputs, kept, captures=is_proposing)
        sampled = self._split(output.hidden, kept, step, wanted)
        self._forwarded = Forwarded(step, features, output, sampled, time.thread_time() - start)

    @torch.inference_mode()
    def sample(self) -> PendingResult:
        """Draw after the forwarded step's positions, keep what holds in the rows, and propose the next drafts."""
        forwarded, self._forwarded = self._forwarded, None
        assert forwarded is not None, "sample() follows a forward() that ended well"
        start, step = time.thread_time(), forwarded.step
        self._rows.advance_unsampled(step.plan, step.inputs.seq_lens)
        drawn = self._draw(forwarded) if step.positions.num_positions else None
        collected = {feature.name: feature.collect(step, drawn) for feature in forwarded.features}
        verified = _nothing_verified(self._transfers.device) if drawn is None else drawn.verified
        if self._proposer is not None:
            is_resumed = self._note_shown(step.plan)
            if step.plan.num_proposals:
                self._propose(self._proposer, forwarded, verified, is_resumed)
        is_warming_up = self._take_warming_up is not None and self._take_warming_up()
        is_on_cpu = self._transfers.device.type == "cpu"
        seconds = forwarded.seconds + time.thread_time() - start if is_on_cpu else None
        times = StepTimes(seconds, is_warming_up)
        columns = {name: each for name, each in collected.items() if each is not None}
        return PendingResult(verified, columns, times, self._transfers)

    def use_idle_time(self) -> bool:
        """Do one piece of what makes later steps faster (capture a graph); to be called between steps while there is no
        work. False: nothing is left to do."""
        return self._kv_memory.prepare_next()

    def _kept_tokens(
        self, step: ForwardedStep, wanted: dict[str, NDArray[np.int64]], is_proposing: bool
    ) -> Tensor | None:
        """Tokens whose hidden states are wanted: those sampled after, then those of features; None: all.

        A step that wants none still keeps its last token, so that no kernel meets an empty input.
        """
        if is_proposing and self._proposer is not None and self._proposer.wants_hidden:
            return None
        positions, num_tokens = step.positions, step.inputs.token_ids.shape[0]
        if wanted:
            tokens = np.concatenate([positions.host_tokens, *wanted.values()])
        elif positions.num_positions == num_tokens:
            return None
        elif positions.num_positions:
            return positions.tokens
        else:
            tokens = np.array([num_tokens - 1])
        return self._transfers.upload(tokens)[0]

    def _split(
        self, hidden: Tensor, kept: Tensor | None, step: ForwardedStep, wanted: dict[str, NDArray[np.int64]]
    ) -> Tensor:
        """Hidden states of the sampled positions; those of features join the step. In the order of `_kept_tokens`."""
        positions, end = step.positions, step.positions.num_positions
        for name, tokens in wanted.items():
            start, end = end, end + len(tokens)
            step.hidden[name] = hidden[self._transfers.upload(tokens)[0]] if kept is None else hidden[start:end]
        if kept is None:
            return hidden if positions.num_positions == len(hidden) else hidden[positions.tokens]
        return hidden[: positions.num_positions]

    def _draw(self, forwarded: Forwarded) -> DrawnStep:
        step, positions = forwarded.step, forwarded.step.positions
        logits = self._to_logits(forwarded.sampled_hidden)
        for feature in forwarded.features:
            logits = feature.adjust(logits, positions)
        after = step.inputs.positions
        after = after if positions.num_positions == len(after) else after[positions.tokens]
        masks = [mask for feature in forwarded.features if (mask := feature.mask(step)) is not None]
        allowed = self._transfers.upload(np.bitwise_and.reduce(masks))[0] if masks else None
        adjusted = partial(adjust_logits, logits, self._rows, positions, after, allowed, penalize=self._ops.penalize)
        max_seq_len = step.inputs.lengths.max_seq_len
        return DrawnStep(adjusted, self._draw_and_verify(logits, positions, after, allowed, max_seq_len))

    def _draw_and_verify(
        self, logits: Tensor, positions: SampledPositions, after: Tensor, mask: Tensor | None, max_seq_len: int
    ) -> VerifiedTokens:
        """Which drafts hold; the rows know the tokens that do from now on."""
        ops = self._ops
        drawn = DrawnPositions(after, positions.starts, positions.rows, positions.draws, positions.width)
        if takes_most_likely(positions, mask):
            return ops.verify_most_likely(logits, drawn, self._known)
        token_ids = draw(logits, self._rows, positions, after, ops, mask=mask, max_seq_len=max_seq_len)
        return ops.verify_drafts(token_ids, drawn, self._known)

    def _note_shown(self, plan: StepPlan) -> BoolArray:
        """Which of the step's sequences the proposer has not seen the step before of."""
        self._was_shown[[new.row for new in plan.added] + [fork.target_row for fork in plan.forks]] = False
        is_resumed: BoolArray = ~self._was_shown[plan.rows]
        self._was_shown[plan.rows] = plan.num_proposals > 0
        return is_resumed

    def _propose(
        self, proposer: Proposer, forwarded: Forwarded, verified: VerifiedTokens, is_resumed: BoolArray
    ) -> None:
        """Let the proposer see the step; its guesses wait in the rows."""
        step, output = forwarded.step, forwarded.output
        positions = step.positions
        rows = positions.rows.long()
        requests, firsts = positions.requests, positions.starts[:-1].long()
        last = verified.num_accepted.long() - 1
        next_tokens = verified.token_ids.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1).long()
        accepted = positions.tokens[firsts] + last if len(rows) else rows
        host_rows = positions.host_rows
        if positions.drawing is not None:
            own = positions.drawing.index
            rows, requests, accepted, next_tokens = rows[own], requests[own], accepted[own], next_tokens[own]
            host_rows = host_rows[positions.drawing.host_index]
        drafts = proposer.propose(
            VerifiedStep(
                inputs=step.inputs,
                hidden=output.hidden,
                captured=output.captured,
                sampled=requests,
                rows=rows,
                last_accepted=accepted,
                next_tokens=next_tokens,
                num_known=self._rows.num_known[rows].long(),
                num_slots=self._rows.num_slots[rows],
                token_ids=self._rows.token_ids,
                batch=BatchRows(
                    step.plan.rows, is_resumed, host_rows, [self._rows.extra_keys[row] for row in host_rows]
                ),
                block_copies=step.plan.block_copies,
                num_proposals=step.plan.num_proposals,
            )
        )
        if len(rows):  # ranks may round differently, and must not disagree on what they verify
            store_drafts(self._rows, rows, self._tensor.broadcast(drafts, source=0))


def _wanted_tokens(features: Sequence[StepFeature], plan: StepPlan, inputs: StepInputs) -> dict[str, NDArray[np.int64]]:
    """Those of whose hidden states features want to see, by feature."""
    wanted = {feature.name: feature.before_decoder(plan, inputs) for feature in features}
    return {name: tokens for name, tokens in wanted.items() if tokens is not None}


def _nothing_verified(device: torch.device) -> VerifiedTokens:
    return VerifiedTokens.empty(0, 1, device)
