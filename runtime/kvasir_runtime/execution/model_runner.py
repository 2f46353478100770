"""Computes a rank's steps: rows, inputs, decoder, logits of the positions that matter, draws, drafts, results.

Steps run strictly in order on one thread. Tokens that are drawn stay in the rows, so later steps may compute them
before the scheduler has seen them; their results are read whenever the reader comes to it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, LayerCache, StepInputs
from kvasir_runtime.execution.executor import TokenMask
from kvasir_runtime.execution.kv_buffer import copy_blocks
from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.logprobs import token_logprobs
from kvasir_runtime.execution.pending_result import PendingResult, StepTensors
from kvasir_runtime.execution.prompt_scores import ScoredPrompt, score_prompt, scored_prompts
from kvasir_runtime.execution.rows import Rows, store_drafts
from kvasir_runtime.execution.sampled_positions import SampledPositions, SampledPositionsBuilder
from kvasir_runtime.execution.sampler import draw, takes_most_likely
from kvasir_runtime.execution.stage_buffer import StageBuffer
from kvasir_runtime.execution.step_inputs import StepInputBuilder
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.kernels.verify_drafts import DrawnPositions, KnownTokens, VerifiedTokens
from kvasir_runtime.models.decoder import ComputeStep, Decoder, DecoderOutput
from kvasir_runtime.parallel.collectives import Collectives, SingleRank
from kvasir_runtime.scheduling.step import BoolArray, StepPlan
from kvasir_runtime.speculative.proposer import Proposer, ShownRows, VerifiedStep


@dataclass(frozen=True, slots=True)
class EagerDecoder:
    """Runs the decoder kernel by kernel."""

    decoder: Decoder
    backend: AttentionBackend
    caches: Sequence[LayerCache]
    captured_layers: tuple[int, ...]
    entering: StageBuffer | None = None
    """Of a pipeline stage behind the first."""

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        attention = self.backend.prepare(inputs)
        captured_layers = self.captured_layers if captures else ()
        entering = None
        if self.entering is not None:
            entering = self.entering.states(len(inputs.token_ids), captures=captures)
        return self.decoder(inputs.token_ids, attention, self.caches, kept_tokens, captured_layers, entering)


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A step between the decoder and the draws."""

    plan: StepPlan
    inputs: StepInputs
    positions: SampledPositions
    prompts: list[ScoredPrompt]
    output: DecoderOutput
    sampled_hidden: Tensor  # [num_positions, hidden_size]
    prompt_hidden: list[Tensor]  # of each scored prompt [n, hidden_size]
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
        tensor: Collectives | None = None,
        idle_work: Callable[[], bool] | None = None,
        take_warming_up: Callable[[], bool] | None = None,
    ) -> None:
        """`take_warming_up` as of `RunnerGraphs`."""
        self._rows = rows
        self._buffer = buffer
        self._compute = compute
        self._to_logits = to_logits
        self._ops = ops
        self._proposer = proposer
        self._transfers = transfers
        self._tensor = SingleRank() if tensor is None else tensor
        self._idle_work = idle_work
        self._take_warming_up = take_warming_up
        self._inputs = StepInputBuilder(rows, ops.prepare_inputs, max_num_batched_tokens, transfers)
        self._positions = SampledPositionsBuilder(rows, transfers)
        self._known = KnownTokens(rows.token_ids, rows.num_known, rows.num_computed, rows.drafts)
        self._forwarded: ForwardedStep | None = None
        self._was_shown = np.zeros(len(rows.num_slots), dtype=np.bool_)
        """Of each row, whether the proposer has seen its last step."""

    @property
    def kv_buffer(self) -> Tensor:
        return self._buffer

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Take over the plan's differences and compute its tokens. `sample` follows, before the next step."""
        self._forwarded, start = None, time.thread_time()
        self._rows.apply(plan)
        copy_blocks(self._buffer, plan.block_copies)
        inputs = self._inputs.build(plan)
        query_lens = inputs.lengths.query_lens
        positions = self._positions.build(plan, query_lens)
        prompts = scored_prompts(plan, self._rows, query_lens)
        is_proposing = self._proposer is not None and plan.num_proposals > 0
        kept = self._kept_tokens(inputs, positions, prompts, is_proposing)
        output = self._compute(inputs, kept, captures=is_proposing)
        sampled, scored = self._split(output.hidden, kept, positions, prompts)
        seconds = time.thread_time() - start
        self._forwarded = ForwardedStep(plan, inputs, positions, prompts, output, sampled, scored, seconds)

    @torch.inference_mode()
    def sample(self, mask: TokenMask | None = None) -> PendingResult:
        """Draw after the forwarded step's positions, keep what holds in the rows, and propose the next drafts.

        `mask` says which tokens are allowed after each position.
        """
        step, self._forwarded = self._forwarded, None
        assert step is not None, "sample() follows a forward() that ended well"
        start = time.thread_time()
        self._rows.advance_unsampled(step.plan, step.inputs.seq_lens)
        tensors = self._draw(step, mask)
        tensors.prompts = [
            (prompt.row, score_prompt(prompt, hidden, self._rows, self._to_logits))
            for prompt, hidden in zip(step.prompts, step.prompt_hidden, strict=True)
        ]
        if self._proposer is not None:
            before = time.thread_time()
            is_resumed = self._note_shown(step.plan)
            if step.plan.num_proposals:
                self._propose(self._proposer, step, tensors.verified, is_resumed)
                tensors.is_catching_up = self._proposer.is_catching_up
            tensors.proposer_seconds = time.thread_time() - before
        if self._take_warming_up is not None:
            tensors.is_warming_up = self._take_warming_up()
        if self._transfers.device.type == "cpu":
            tensors.processor_seconds = step.seconds + time.thread_time() - start
        return PendingResult(tensors, step.positions, self._rows, self._transfers)

    def use_idle_time(self) -> bool:
        """Do one piece of what makes later steps faster (capture a graph); to be called between steps while there is no
        work. False: nothing is left to do."""
        return self._idle_work is not None and self._idle_work()

    def _kept_tokens(
        self, inputs: StepInputs, positions: SampledPositions, prompts: list[ScoredPrompt], is_proposing: bool
    ) -> Tensor | None:
        """Tokens whose hidden states are wanted: those sampled after, then those that score prompts; None: all.

        A step that wants none still keeps its last token, so that no kernel meets an empty input.
        """
        if is_proposing and self._proposer is not None and self._proposer.wants_hidden:
            return None
        num_tokens = inputs.token_ids.shape[0]
        if prompts:
            wanted = np.concatenate([positions.host_tokens, *(prompt.tokens for prompt in prompts)])
        elif positions.num_positions == num_tokens:
            return None
        elif positions.num_positions:
            return positions.tokens
        else:
            wanted = np.array([num_tokens - 1])
        return self._transfers.upload(wanted)[0]

    def _split(
        self, hidden: Tensor, kept: Tensor | None, positions: SampledPositions, prompts: list[ScoredPrompt]
    ) -> tuple[Tensor, list[Tensor]]:
        """(hidden states of the sampled positions, those of each prompt), in the order of `_kept_tokens`."""
        num_sampled = positions.num_positions
        if kept is None:
            sampled = hidden if num_sampled == len(hidden) else hidden[positions.tokens]
            return sampled, [hidden[self._transfers.upload(prompt.tokens)[0]] for prompt in prompts]
        sizes = [len(prompt.tokens) for prompt in prompts]
        ends = np.cumsum([num_sampled, *sizes]).tolist()
        return hidden[:num_sampled], [hidden[end - size : end] for end, size in zip(ends[1:], sizes, strict=True)]

    def _draw(self, step: ForwardedStep, mask: TokenMask | None) -> StepTensors:
        positions, rows = step.positions, self._rows
        if not positions.num_positions:
            return StepTensors(_nothing_verified(self._transfers.device))
        logits = self._to_logits(step.sampled_hidden)
        after = step.inputs.positions
        after = after if positions.num_positions == len(after) else after[positions.tokens]
        asked = positions.logprobs
        allowed = None if mask is None else self._transfers.upload(mask)[0]
        candidates = None
        if positions.beams is not None:
            candidates = _candidates(adjust_logits(logits, rows, positions, after, allowed), rows, positions)
        verified = self._draw_and_verify(logits, positions, after, allowed, step.inputs.lengths.max_seq_len)
        logprobs = None
        if asked is not None:
            most = int(rows.sampling.num_logprobs[positions.host_rows].max())
            token_ids = verified.token_ids.flatten()[positions.places].long()
            logprobs = token_logprobs(asked.of(logits), asked.of(token_ids), most)
        return StepTensors(verified, logprobs, candidates)

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
        self, proposer: Proposer, step: ForwardedStep, verified: VerifiedTokens, is_resumed: BoolArray
    ) -> None:
        """Let the proposer see the step; its guesses wait in the rows."""
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
                hidden=step.output.hidden,
                captured=step.output.captured,
                sampled=requests,
                rows=rows,
                last_accepted=accepted,
                next_tokens=next_tokens,
                num_known=self._rows.num_known[rows].long(),
                num_slots=self._rows.num_slots[rows],
                token_ids=self._rows.token_ids,
                shown=ShownRows(
                    step.plan.rows, is_resumed, host_rows, [self._rows.extra_keys[row] for row in host_rows]
                ),
                block_copies=step.plan.block_copies,
                num_proposals=step.plan.num_proposals,
            )
        )
        if len(rows):  # ranks may round differently, and must not disagree on what they verify
            store_drafts(self._rows, rows, self._tensor.broadcast(drafts, source=0))


def _candidates(adjusted: Tensor, rows: Rows, positions: SampledPositions) -> tuple[Tensor, Tensor]:
    """Token ids and adjusted log-probabilities [num_beams, most] of the beams' most likely tokens."""
    assert positions.beams is not None
    most = int(rows.num_candidates[positions.host_rows].max())
    likely = positions.beams.of(adjusted).topk(min(most, adjusted.shape[1]), dim=-1)
    return likely.indices, likely.values


def _nothing_verified(device: torch.device) -> VerifiedTokens:
    return VerifiedTokens.empty(0, 1, device)
