"""Whole steps of a tiny model, from plan to result."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.runtime.exactness.speculators import speculative_config
from tests.runtime.speculative.conftest import make_llama
from tests.runtime.speculative.host_reads import HostReads, unseen_by
from tests.runtime.watched_platform import WatchedPlatform
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention, ReferenceStep
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.model_runner import ModelRunner
from kvasir_runtime.execution.platform import Platform
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.runner_assembly import step_features
from kvasir_runtime.execution.synthetic_steps import GREEDY
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.kernels.step_ops import StepOps, reference_step_ops
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.decoder import DecoderOutput
from kvasir_runtime.scheduling.step import Fork, StepResult
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep
from kvasir_runtime.speculative.select import proposer_of

BLOCK_SIZE = 8
PROMPT = [5, 6, 7, 8, 9]
TABLE = [(row, 0, index, 1 + 4 * row + index) for row in range(4) for index in range(4)]
"""Rows 0 to 3 have four blocks each."""
SAMPLED = {"temperature": 1.5, "top_p": 0.95, "seed": 2**60 + 5}


class ScriptedProposer:
    """Guesses the tokens that `script` holds after those known; keeps what it was shown."""

    name = "scripted"
    captured_layers: tuple[int, ...] = ()
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self, script: list[int], wants_hidden: bool = False) -> None:
        self.script = script
        self.wants_hidden = wants_hidden
        self.seen: list[VerifiedStep] = []

    def bind(self, setup: ProposerSetup) -> None:
        assert not setup.caches

    def propose(self, step: VerifiedStep) -> Tensor:
        self.seen.append(step)
        drafts = [
            (self.script[known : known + step.num_proposals] + [-1] * step.num_proposals)[: step.num_proposals]
            for known in step.num_known.tolist()
        ]
        return torch.tensor(drafts, dtype=torch.int32).view(len(drafts), step.num_proposals)


class DeviceProposer(ScriptedProposer):
    """Guesses without asking the device."""

    def propose(self, step: VerifiedStep) -> Tensor:
        return step.next_tokens.int().unsqueeze(1).expand(-1, step.num_proposals)


@pytest.fixture
def load(folder: Any) -> Callable[..., Worker]:
    def load_with(
        proposer: ScriptedProposer | SpeculativeConfig | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
        platform: Platform | None = None,
    ) -> Worker:
        speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
        if proposer is None or isinstance(proposer, SpeculativeConfig):
            speculation = proposer
        execution = ExecutionConfig(num_threads=1, speculative_config=speculation)
        scripted = proposer if isinstance(proposer, ScriptedProposer) else None
        return load_worker(
            ModelConfig(model=str(folder), device=device),
            # Others test beside it on one GPU, which they must not fill.
            CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=64 if device == "cuda" else None),
            execution,
            SchedulerConfig(max_num_seqs=4),
            proposer_of(execution) if scripted is None else lambda *placed: scripted,
            platform=platform,
        )

    return load_with


def step(runner: ModelRunner, plan: Any) -> StepResult:
    runner.forward(plan)
    return runner.sample().result()


@pytest.fixture
def generate(make_plan: Any, new_sequence: Any) -> Callable[..., list[int]]:
    """Tokens of one sequence, prompt included, computed in chunks and then verified with so many drafts a step."""

    def tokens_of(
        runner: ModelRunner, number: int, chunk: int = 5, num_drafts: int = 0, row: int = 0, **params: Any
    ) -> list[int]:
        known, new = list(PROMPT), new_sequence(row, PROMPT, **params)
        for first in range(0, len(PROMPT), chunk):
            length = min(chunk, len(PROMPT) - first)
            is_last = first + length == len(PROMPT)
            result = step(
                runner,
                make_plan(
                    chunks=[(row, first, length, is_last)],
                    added=[new] if first == 0 else [],
                    tables=TABLE if first == 0 else [],
                    proposals=num_drafts,
                ),
            )
        known.append(int(result.token_ids[0, 0]))
        while len(known) < len(PROMPT) + number:
            plan = make_plan(decodes=[(row, 1 + num_drafts)], starts=[len(known) - 1], proposals=num_drafts)
            result = step(runner, plan)
            known.extend(result.token_ids[0, : result.num_accepted[0]].tolist())
        return known[: len(PROMPT) + number]

    return tokens_of


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_depend_neither_on_chunks_nor_on_the_row(params: Any, load: Any, generate: Any) -> None:
    runner = load().runner
    whole = generate(runner, 12, **params)
    assert generate(runner, 12, chunk=2, row=3, **({"seed": 0} | params)) == whole
    assert len(set(whole[len(PROMPT) :])) > 2


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guess", ["right", "wrong", "half", "none"])
def test_drafts_change_no_token(guess: str, params: Any, load: Any, generate: Any) -> None:
    plain = generate(load().runner, 20, **params)
    script = {
        "right": plain,
        "wrong": [(token + 1) % 64 for token in plain],
        "half": [token if i % 3 else (token + 1) % 64 for i, token in enumerate(plain)],
        "none": [-1] * len(plain),
    }[guess]
    proposer = ScriptedProposer(script)
    assert generate(load(proposer).runner, 20, num_drafts=3, **params) == plain
    # The warm-up's steps, the prompt's, and those of the decodes.
    num_decodes = sum(len(seen.inputs.rows) == 1 and int(seen.num_known[0]) > 6 for seen in proposer.seen)
    assert num_decodes == {"right": 5, "wrong": 19, "none": 19}.get(guess, num_decodes)


@pytest.mark.parametrize("params", [{"frequency_penalty": 1.5, "repetition_penalty": 1.3}, {"min_tokens": 9}], ids=str)
def test_drafts_are_history_for_what_comes_after_them(params: Any, load: Any, generate: Any) -> None:
    params = params | {"stop_token_ids": tuple(range(0, 64, 2))}
    plain = generate(load().runner, 20, **params)
    proposer = ScriptedProposer(plain)
    assert generate(load(proposer).runner, 20, num_drafts=3, **params) == plain
    assert max(int(seen.num_known[0]) for seen in proposer.seen if len(seen.rows)) > 20


def test_missing_drafts_are_not_computed_on_a_cpu(load: Any, generate: Any, make_plan: Any) -> None:
    proposer = ScriptedProposer([-1] * 40)
    runner = load(proposer).runner
    known = generate(runner, 1, num_drafts=3)
    result = step(runner, make_plan(decodes=[(0, 4)], starts=[len(known) - 1], proposals=1))
    assert proposer.seen[-1].inputs.token_ids.tolist() == known[-1:]
    assert proposer.seen[-1].inputs.lengths.query_lens.tolist() == [1]
    assert (result.num_accepted.tolist(), result.num_drafts.tolist()) == ([1], [0])


def test_drafts_of_an_earlier_step_do_not_linger(load: Any, generate: Any, make_plan: Any) -> None:
    plain = generate(load().runner, 12)
    runner = load(ScriptedProposer(plain)).runner
    generate(runner, 1, num_drafts=3)
    step(runner, make_plan(decodes=[(0, 1)], starts=[5], proposals=1))
    assert step(runner, make_plan(decodes=[(0, 4)], starts=[6])).num_drafts.tolist() == [1]


def test_a_proposer_sees_what_holds(load: Any, generate: Any, make_plan: Any) -> None:
    plain = generate(load().runner, 4)
    proposer = ScriptedProposer([*plain[:6], (plain[6] + 1) % 64, *plain[7:]], wants_hidden=True)
    runner = load(proposer).runner
    generate(runner, 1, num_drafts=2)
    assert proposer.seen[-1].hidden.shape[0] == len(PROMPT)
    assert proposer.seen[-1].last_accepted.tolist() == [len(PROMPT) - 1]
    result = step(runner, make_plan(decodes=[(0, 3)], starts=[5], proposals=2))
    seen = proposer.seen[-1]
    assert (result.num_accepted.tolist(), result.num_drafts.tolist()) == ([1], [2])
    assert (seen.last_accepted.tolist(), seen.next_tokens.tolist(), seen.num_known.tolist()) == ([0], [plain[6]], [7])
    assert (seen.sampled.tolist(), seen.rows.tolist(), seen.hidden.shape[0]) == ([0], [0], 3)
    assert seen.token_ids[0, :7].tolist() == plain[:7]


def test_a_proposer_is_not_shown_a_step_that_wants_no_drafts(load: Any, generate: Any, make_plan: Any) -> None:
    proposer = ScriptedProposer([-1] * 40, wants_hidden=True)
    runner = load(proposer).runner
    proposer.seen.clear()  # of steps that warm up
    generate(runner, 1)
    assert proposer.seen == []
    step(runner, make_plan(decodes=[(0, 1)], starts=[5], proposals=2))
    assert len(proposer.seen) == 1


def test_a_step_says_what_it_took(load: Any, generate: Any, make_plan: Any) -> None:
    runner = load(ScriptedProposer([-1] * 40)).runner
    generate(runner, 1)
    result = step(runner, make_plan(decodes=[(0, 1)], starts=[5], proposals=2))
    assert result.times.processor_seconds > 0


def test_a_proposer_knows_which_sequences_it_was_not_shown_before(load: Any, make_plan: Any, new_sequence: Any) -> None:
    proposer = ScriptedProposer([-1] * 40)
    runner = load(proposer).runner
    proposer.seen.clear()  # of steps that warm up
    step(runner, make_plan(chunks=[(0, 0, 5, True)], added=[new_sequence(0, PROMPT)], proposals=1))
    for start, proposals in ((5, 1), (6, 0), (7, 1)):
        step(runner, make_plan(decodes=[(0, 1)], starts=[start], proposals=proposals))
    added = [new_sequence(1, PROMPT)]
    step(runner, make_plan(decodes=[(0, 1)], chunks=[(1, 0, 5, True)], starts=[8], added=added, proposals=1))
    step(runner, make_plan(decodes=[(0, 1), (1, 1)], starts=[9, 9], forks=[Fork(0, 1, GREEDY)], proposals=1))
    assert [seen.batch.is_resumed.tolist() for seen in proposer.seen] == [
        [True], [False], [True], [False, True], [False, True],
    ]  # fmt: skip
    assert [seen.batch.rows.tolist() for seen in proposer.seen] == [[0], [0], [0], [0, 1], [0, 1]]
    assert [seen.batch.sampled_rows.tolist() for seen in proposer.seen] == [[0], [0], [0], [0, 1], [0, 1]]


def test_a_proposer_is_told_the_extra_keys_of_those_that_drew(load: Any, make_plan: Any, new_sequence: Any) -> None:
    proposer = ScriptedProposer([-1] * 40)
    runner = load(proposer).runner
    added = [new_sequence(0, PROMPT, salt="0"), new_sequence(1, PROMPT, candidates=2, salt="1")]
    chunks = [(0, 0, 3, False), (1, 0, 5, True), (2, 0, 5, True)]
    plan = make_plan(chunks=chunks, added=[*added, new_sequence(2, PROMPT)], tables=TABLE, proposals=1)
    step(runner, plan)
    assert list(proposer.seen[-1].batch.extra_keys) == [()]
    step(runner, make_plan(decodes=[(2, 1)], starts=[5], chunks=[(0, 3, 2, True)], proposals=1))
    assert list(proposer.seen[-1].batch.extra_keys) == [(), (b"0",)]


def test_states_for_the_proposer_are_kept_only_in_steps_that_want_drafts(
    load: Any, make_plan: Any, new_sequence: Any
) -> None:
    proposer = ScriptedProposer([-1] * 40, wants_hidden=True)
    proposer.captured_layers = (0,)
    platform = WatchedPlatform(graph_bytes=0)
    runner, seen = load(proposer, platform=platform).runner, platform.target.outputs
    seen.clear()  # of steps that warm up
    step(runner, make_plan(chunks=[(0, 0, 5, True)], added=[new_sequence(0, PROMPT)]))
    step(runner, make_plan(decodes=[(0, 1)], starts=[5], proposals=1))
    assert [len(output.captured) for output in seen] == [0, 1]
    assert len(seen[0].hidden) == 1, "of the prompt's tokens the last is sampled after"


def test_decodes_and_chunks_share_a_step(load: Any, generate: Any, make_plan: Any, new_sequence: Any) -> None:
    runner = load().runner
    expected = generate(runner, 3)
    generate(runner, 1)
    chunks = [(2, 0, 3, False), (1, 0, 5, True)]
    added = [new_sequence(1, PROMPT), new_sequence(2, PROMPT)]
    result = step(runner, make_plan(decodes=[(0, 1)], starts=[5], chunks=chunks, added=added))
    assert result.token_ids[:, 0].tolist() == [expected[6], expected[5]]
    plan = make_plan(decodes=[(0, 1), (1, 1)], starts=[6, 5], chunks=[(2, 3, 2, True)])
    assert step(runner, plan).token_ids[:, 0].tolist() == [expected[7], expected[6], expected[5]]


def test_steps_run_ahead_of_their_results(load: Any, generate: Any, make_plan: Any) -> None:
    runner = load().runner
    expected = generate(runner, 5)
    generate(runner, 1)
    pending = []
    for position in range(5, 9):
        runner.forward(make_plan(decodes=[(0, 1)], starts=[position]))
        pending.append(runner.sample())
    assert [int(one.result().token_ids[0, 0]) for one in pending] == expected[6:]


def test_a_chunk_before_the_last_samples_nothing(load: Any, make_plan: Any, new_sequence: Any) -> None:
    result = step(load().runner, make_plan(chunks=[(0, 0, 2, False)], added=[new_sequence(0, PROMPT)]))
    assert result.token_ids.shape == (0, 1)
    assert len(result.num_accepted) == 0


def test_a_beam_reports_candidates_and_waits_for_its_token(
    load: Any, generate: Any, make_plan: Any, new_sequence: Any
) -> None:
    runner = load().runner
    expected = generate(runner, 2)
    beam, other = new_sequence(0, PROMPT, candidates=3, seed=0), new_sequence(1, PROMPT, logprobs=3)
    plan = make_plan(chunks=[(0, 0, 5, True), (1, 0, 5, True)], added=[beam, other], tables=TABLE)
    result = step(runner, plan)
    assert result.num_accepted.tolist() == [0, 1]
    assert list(result.candidates) == [0]
    candidates, raw = result.candidates[0], result.logprobs[1][0]
    assert candidates.token_ids == raw.token_ids[1:]
    np.testing.assert_allclose(candidates.logprobs, raw.logprobs[1:], rtol=1e-5)
    forks = [Fork(0, 2, beam.spec.sampling)]
    tokens = [(0, 5, expected[5]), (2, 5, candidates.token_ids[1])]
    plan = make_plan(decodes=[(0, 1), (2, 1)], starts=[5, 5], forks=forks, tokens=tokens, copies=[(1, 9)],
                     tables=[(2, 0, 0, 9)])  # fmt: skip
    result = step(runner, plan)
    assert result.candidates[0].token_ids[0] == expected[6]
    assert set(result.candidates) == {0, 2}


def test_every_part_of_a_result_finds_its_place_beside_all_others(load: Any, make_plan: Any, new_sequence: Any) -> None:
    runner = load().runner
    beam, plain = new_sequence(0, PROMPT, candidates=3), new_sequence(1, PROMPT, logprobs=2)
    scored = [new_sequence(row, PROMPT, prompt_logprobs=number) for row, number in ((2, 1), (3, 2))]
    chunks = [(0, 0, 5, True), (1, 0, 5, True), (2, 0, 3, False), (3, 0, 5, True)]
    result = step(runner, make_plan(chunks=chunks, added=[beam, plain, *scored], tables=TABLE))
    alone = step(runner, make_plan(chunks=[(1, 0, 5, True)], added=[plain]))
    assert result.token_ids[1:, 0].tolist() == alone.token_ids[:, 0].tolist() * 2
    assert result.num_accepted.tolist() == [0, 1, 1]
    assert result.logprobs[1][0].token_ids == alone.logprobs[1][0].token_ids
    assert result.candidates[0].token_ids[:2] == alone.logprobs[1][0].token_ids[1:]
    assert {row: [entry.token_ids[0] for entry in entries] for row, entries in result.prompt_logprobs.items()} == {
        2: PROMPT[1:4], 3: PROMPT[1:]
    }  # fmt: skip
    assert {row: len(entries[0].logprobs) for row, entries in result.prompt_logprobs.items()} == {2: 2, 3: 3}


def test_copied_blocks_hold_what_their_sources_held(load: Any, generate: Any, make_plan: Any) -> None:
    """A later copy reads what an earlier one wrote."""
    runner = load().runner
    expected = generate(runner, 3)
    generate(runner, 1)
    plan = make_plan(decodes=[(0, 1)], starts=[5], copies=[(1, 20), (20, 21)], tables=[(0, 0, 0, 21)])
    assert step(runner, plan).token_ids[0, 0] == expected[6]
    assert step(runner, make_plan(decodes=[(0, 1)], starts=[6])).token_ids[0, 0] == expected[7]


def test_logprobs_come_with_every_token_that_holds(load: Any, generate: Any, make_plan: Any) -> None:
    plain = generate(load().runner, 8)
    runner = load(ScriptedProposer([*plain[:8], 64 - plain[8], 0])).runner
    generate(runner, 1, num_drafts=3, logprobs=2)
    result = step(runner, make_plan(decodes=[(0, 4)], starts=[5]))
    assert result.num_accepted.tolist() == [3]
    assert [entry.token_ids[0] for entry in result.logprobs[0]] == plain[6:9]
    assert [len(entry.token_ids) for entry in result.logprobs[0]] == [3, 3, 3]
    assert [entry.rank for entry in result.logprobs[0]] == [1, 1, 1]


def test_reported_logprobs_are_those_before_adjustments(load: Any, make_plan: Any, new_sequence: Any) -> None:
    runner = load().runner
    added = [new_sequence(0, PROMPT, logprobs=1), new_sequence(1, PROMPT, logprobs=1, logit_bias={3: 90.0})]
    result = step(runner, make_plan(chunks=[(0, 0, 5, True), (1, 0, 5, True)], added=added, tables=TABLE))
    plain, biased = result.logprobs[0][0], result.logprobs[1][0]
    assert result.token_ids[1, 0] == biased.token_ids[0] == 3
    assert biased.logprobs[0] < plain.logprobs[0]
    assert (biased.token_ids[1], biased.logprobs[1]) == (plain.token_ids[1], plain.logprobs[1])


@pytest.mark.parametrize("chunk", [5, 2])
def test_prompt_logprobs_score_the_prompt_and_leave_the_sampled_token_alone(
    chunk: int, load: Any, generate: Any, make_plan: Any, new_sequence: Any
) -> None:
    runner = load().runner
    expected = generate(runner, 1)
    scores, new = [], [new_sequence(0, PROMPT, prompt_logprobs=1)]
    for first in range(0, 5, chunk):
        length = min(chunk, 5 - first)
        chunks = [(0, first, length, first + length == 5), (1, first, length, first + length == 5)]
        result = step(runner, make_plan(chunks=chunks, added=[*new, new_sequence(1, PROMPT)] if first == 0 else []))
        scores.extend(result.prompt_logprobs.get(0, []))
    assert [entry.token_ids[0] for entry in scores] == PROMPT[1:]
    assert [len(entry.token_ids) for entry in scores] == [2] * 4
    assert result.token_ids[:, 0].tolist() == [expected[5]] * 2
    assert 1 not in result.prompt_logprobs


def test_prompt_logprobs_are_the_same_for_a_proposer_that_wants_all_hidden_states(
    load: Any, make_plan: Any, new_sequence: Any
) -> None:
    plan = make_plan(chunks=[(0, 0, 5, True)], added=[new_sequence(0, PROMPT, prompt_logprobs=1)])
    plain = step(load().runner, plan)
    hidden = step(load(ScriptedProposer([], wants_hidden=True)).runner, plan)
    assert hidden.prompt_logprobs == plain.prompt_logprobs
    assert hidden.token_ids.tolist() == plain.token_ids.tolist()


@pytest.mark.parametrize("num_proposals", [0, 2])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "top_p": 0.9}, {"frequency_penalty": 0.5, "logprobs": 1}], ids=str
)
def test_a_steady_decode_uploads_new_blocks_and_downloads_its_result(
    params: Any, num_proposals: int, make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    proposer = DeviceProposer([]) if num_proposals else None
    runner = without_a_decoder(make_rows(vocab_size=8), as_on_a_gpu(), transfers, proposer)
    width = 1 + num_proposals
    added = [new_sequence(row, [1, 2, 3], computed=2, **params) for row in range(2)]
    decodes = [(0, width), (1, width)]
    step(runner, make_plan(decodes=decodes, starts=[2, 2], added=added, proposals=num_proposals))
    transfers.uploads.clear()
    transfers.downloads.clear()
    for position in range(3, 6):
        tables = [(1, 0, 1, 3)] if position == 4 else []
        step(runner, make_plan(decodes=decodes, starts=[position] * 2, tables=tables, proposals=num_proposals))
    assert transfers.uploads == [16]
    # Tokens, and how many of them hold and how many drafts there were, for each sequence; besides those, of each token
    # two log-probabilities and a rank.
    of_logprobs = width * (2 * 8 + 2 * 4 + 8) if "logprobs" in params else 0
    assert transfers.downloads == [2 * ((width + 2) * 4 + of_logprobs)] * 3


def as_on_a_gpu() -> StepOps:
    """Missing drafts are computed, so that shapes stay as planned."""
    return reference_step_ops(drops_missing_drafts=False)


def without_a_decoder(rows: Rows, ops: StepOps, transfers: Any, proposer: Any = None) -> ModelRunner:
    """Each token is followed by itself."""
    vocab_size = rows.sampling.vocab_size
    return ModelRunner(
        rows=rows,
        buffer=torch.zeros((4, 8), dtype=torch.uint8),
        compute=lambda inputs, kept, captures: DecoderOutput(torch.eye(vocab_size)[inputs.token_ids], ()),
        to_logits=lambda hidden: hidden,
        ops=ops,
        proposer=proposer,
        max_num_batched_tokens=16,
        transfers=transfers,
        features=step_features(rows, lambda hidden: hidden),
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 3},
        {"temperature": 1.0, "min_p": 0.01},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 9, "stop_token_ids": (4, 5)},
        {"logprobs": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("are_all", [True, False], ids=["all", "some"])
@pytest.mark.parametrize("num_proposals", [0, 2])
def test_a_steady_decode_reads_nothing_and_sends_nothing_but_through_the_seam(
    num_proposals: int, are_all: bool, params: Any, make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The plain twin of `prepare_inputs` reads lengths, which no GPU's kernel does. What is uploaded, which nobody
    waits for, another test counts."""
    reads = HostReads(monkeypatch)
    ops = replace(as_on_a_gpu(), prepare_inputs=unseen_by(reads, as_on_a_gpu().prepare_inputs))
    monkeypatch.setattr(transfers, "upload", unseen_by(reads, transfers.upload))
    transfers.is_host = False
    proposer = DeviceProposer([]) if num_proposals else None
    runner = without_a_decoder(make_rows(vocab_size=8), ops, transfers, proposer)
    added = [new_sequence(row, [1, 2, 3], computed=2, **(params if are_all or row else {})) for row in range(3)]
    width = 1 + num_proposals
    decodes = [(row, width) for row in range(3)]
    step(runner, make_plan(decodes=decodes, starts=[2] * 3, added=added, proposals=num_proposals))  # lays it out
    for position in range(3, 6):
        plan = make_plan(decodes=decodes, starts=[position] * 3, proposals=num_proposals)
        with reads:
            runner.forward(plan)
            pending = runner.sample()
        result = pending.result()
        assert result.token_ids.shape == (3, width)
        assert result.num_drafts.tolist() == [num_proposals] * 3
    assert reads.found == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}],
    ids=str,
)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_steady_decode_on_a_gpu_waits_for_nothing(
    num_drafts: int, params: Any, load: Any, generate: Any, make_plan: Any
) -> None:
    expected = generate(load().runner, 32, **params)
    runner = load(DeviceProposer([]) if num_drafts else None, device="cuda").runner
    known = generate(runner, 1, num_drafts=num_drafts, **params)
    assert_steady_steps_wait_for_nothing(runner, known, num_drafts, expected, make_plan)


@pytest.mark.gpu
@pytest.mark.parametrize("are_captured", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_drafting_for_a_steady_decode_on_a_gpu_waits_for_nothing(
    method: str, are_captured: bool, load: Any, generate: Any, make_plan: Any, folder: Path, tmp_path: Path
) -> None:
    expected = generate(load().runner, 32)
    runner = load(speculative_config(method, folder, folder, tmp_path / "heads"), device="cuda").runner
    while are_captured and runner.use_idle_time():
        pass
    known = generate(runner, 1, num_drafts=3)
    assert_steady_steps_wait_for_nothing(runner, known, 3, expected, make_plan)


def assert_steady_steps_wait_for_nothing(
    runner: ModelRunner, known: list[int], num_drafts: int, expected: list[int], make_plan: Any
) -> None:
    length = 1 + num_drafts
    plans = [
        make_plan(decodes=[(0, length)], starts=[len(known) - 1 + i * length], proposals=num_drafts) for i in range(6)
    ]
    pending = []
    for number, plan in enumerate(plans):
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first lays the step out
        try:
            runner.forward(plan)
            pending.append(runner.sample())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for result in (one.result() for one in pending):
        known.extend(result.token_ids[0, : result.num_accepted[0]].tolist())
    assert known == expected[: len(known)]


def test_a_backend_prepares_once_a_step_for_all_layers(tmp_path: Path, make_plan: Any, new_sequence: Any) -> None:
    prepared: list[StepInputs] = []

    class CountingAttention(ReferenceAttention):
        def prepare(self, inputs: StepInputs) -> ReferenceStep:
            prepared.append(inputs)
            return super().prepare(inputs)

    make_llama(tmp_path, seed=0, num_hidden_layers=3)
    worker = load_worker(
        ModelConfig(model=str(tmp_path), device="cpu"),
        CacheConfig(block_size=BLOCK_SIZE),
        ExecutionConfig(num_threads=1),
        SchedulerConfig(max_num_seqs=4),
        platform=WatchedPlatform(backend=lambda *choice: CountingAttention()),
    )
    prepared.clear()
    step(worker.runner, make_plan(chunks=[(0, 0, 5, True)], added=[new_sequence(0, PROMPT)], tables=TABLE))
    assert len(prepared) == 1
    step(worker.runner, make_plan(decodes=[(0, 1)], starts=[5]))
    assert len(prepared) == 2
