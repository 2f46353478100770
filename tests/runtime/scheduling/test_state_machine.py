"""The scheduler under a hypothesis state machine: whatever comes, goes, fails or is preempted, in whatever order.

The rank holds the token history of every KV slot (fake_rank.py), so what is shared, copied, freed, found, pulled from
another engine or kept for one wrongly is read as an error. Every sequence that ends has the tokens of a pure function
of its prompt and seed. Whenever the engine does nothing, there is nothing that it could do.

    pytest tests/runtime/scheduling/test_state_machine.py --hypothesis-profile=long --timeout=0

looks for longer, at random.
"""

import struct
import sys
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.runtime.scheduling.conftest import least_blocks
from tests.runtime.scheduling.earlier_stage import FakeEarlierStage
from tests.runtime.scheduling.fake_agent import FakeAgent
from tests.runtime.scheduling.fake_rank import FakeRank, candidates_after, continuation

from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventLog
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup, Reach
from kvasir_runtime.requests.add_request import AddRequest, Pooling, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import Outcome, SequenceOutput
from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.scheduling.beam_search import BeamSearchState, num_candidates
from kvasir_runtime.scheduling.scheduler import Scheduler, SchedulerLimits
from kvasir_runtime.scheduling.step import StepPlan, StepResult
from kvasir_runtime.scheduling.waiting import waiting_queue
from kvasir_runtime.transfer.commands import Place
from kvasir_runtime.transfer.params import KvTransferParams

MAX_MODEL_LEN = 24
MOST_AHEAD = 3
MOST_STEPS = 300
"""In which, for each sequence that is left, all of them must have ended: a budget of one token is possible."""
LAYOUTS = (
    (KvGroup((0,)),),
    (KvGroup((0,)), KvGroup((1,), Reach.window(5))),
    (KvGroup((0,)), KvGroup((1,), Reach.window(3)), KvGroup((2,), Reach.window(8))),
    (KvGroup((0,), Reach.window(6)),),
    (KvGroup((0,), Reach.chunk(6)), KvGroup((1,))),
)
BEGINNING = list(range(5, 24))
HERE = Place(engine_id="here", host="here", port=1)
ELSEWHERE = KvTransferParams(do_remote_prefill=True, remote_host="there", remote_port=1)
WAYS_IN = {
    "at once": None,
    "held": None,
    "from a prefill": msgspec.structs.replace(ELSEWHERE, transfer_id="t"),
    "from a cache": ELSEWHERE,
    "for another": KvTransferParams(do_remote_decode=True),
    "from a cache, for another": msgspec.structs.replace(ELSEWHERE, do_remote_decode=True),
}
"""How a request comes, and what it has to do with other engines."""


@dataclass
class Expected:
    """One sequence as its client sees it."""

    output: list[int]
    """All that it is to have in the end."""
    reason: str
    received: list[int]
    prompt: list[int]
    is_fresh: bool
    """Whether its first output tells the prompt's log-probabilities, where asked for: with it or before."""
    sampling: SamplingParams
    is_beam: bool = False
    is_over: bool = False
    num_pooled: int | None = None
    """Of its prompt's tokens, the last ones, which its vector is made of at least; None: it wants tokens."""


class VaryingDepth:
    """Draft depths that change from one question to the next."""

    def __init__(self, depths: list[int]) -> None:
        self._depths = depths
        self.max_depth = max(depths)
        self._num_asked = 0

    def depths(self, rows):
        self._num_asked += 1
        return rows * 0 + self._depths[self._num_asked % len(self._depths)]

    def observe(self, rows, num_asked, num_accepted) -> None:
        assert (num_accepted <= num_asked).all()

    def forget(self, row: int) -> None: ...


class EventReader:
    """A router that hears every event."""

    def __init__(self, block_size: int, groups: tuple[KvGroup, ...], contents: dict[bytes, list[int]]) -> None:
        """`contents`: of blocks that other engines may have."""
        self.log = KvEventLog(block_size, groups)
        self._has_gaps = not groups[self.log.group].reach.is_full
        self._contents = contents
        self.tokens: dict[bytes, list[int]] = {}
        """Of each block that is there, from the beginning of its sequence."""
        self._ever: dict[bytes, list[int]] = {}

    def read(self) -> None:
        for event in self.log.take():
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.tokens[block_hash]
                case AllBlocksCleared():
                    self.tokens.clear()

    def _store(self, event: BlockStored) -> None:
        before = [] if event.parent_block_hash is None else self._tokens_of(event.parent_block_hash)
        for number, block_hash in enumerate(event.block_hashes, start=1):
            assert block_hash not in self.tokens, "stored twice"
            self.tokens[block_hash] = self._ever[block_hash] = before + event.token_ids[: number * event.block_size]

    def _tokens_of(self, block_hash: bytes) -> list[int]:
        """What is pulled of a window begins behind blocks that were never here, and goes on behind those that are here
        no more."""
        if not self._has_gaps:
            return self.tokens[block_hash]
        return self._ever[block_hash] if block_hash in self._ever else self._contents[block_hash]


@dataclass
class Flight:
    """A step that was planned; its result is None until the rank has computed it."""

    plan: StepPlan
    result: StepResult | None = None


@dataclass(frozen=True)
class Setup:
    block_size: int
    groups: tuple[KvGroup, ...]
    num_spare_blocks: int
    """Beyond those without which an engine does not start."""
    max_num_seqs: int
    budget: int
    chunked: bool
    cache: bool
    policy: str
    preemption_threshold: int
    ahead: int
    """Steps planned beyond the one that is computed."""
    depths: list[int] | None
    wrong_drafts: int
    missing_drafts: int
    num_stages: int

    @property
    def most_at_once(self) -> int:
        """Tokens of a step."""
        return self.budget if self.chunked else MAX_MODEL_LEN

    @property
    def num_blocks(self) -> int:
        return least_blocks(self.groups, self.block_size, MAX_MODEL_LEN, self.most_at_once) + self.num_spare_blocks


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Half of them have next to no room."""
    is_tight = draw(st.booleans())
    return Setup(
        block_size=draw(st.sampled_from([4, 2, 1])),
        groups=draw(st.sampled_from(LAYOUTS)),
        num_spare_blocks=draw(st.integers(0, 1 if is_tight else 12)),
        max_num_seqs=draw(st.integers(1, 6)),
        budget=draw(st.integers(2, 6) if is_tight else st.integers(1, MAX_MODEL_LEN)),
        chunked=is_tight or draw(st.booleans()),
        cache=is_tight or draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority", "fair", "priority"])),
        preemption_threshold=draw(st.integers(0, 2)),
        ahead=draw(st.sampled_from([3, 0, 1, 2, 3])),
        depths=draw(st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=3)),
        wrong_drafts=draw(st.integers(0, 4)),
        missing_drafts=draw(st.integers(0, 3)),
        num_stages=draw(st.sampled_from([1, 2, 1, 3])),
    )


@st.composite
def prompts(draw: st.DrawFn, most: int = 20) -> list[int]:
    """Most begin alike, and some are the same."""
    num_alike = min(most, draw(st.sampled_from([8, 3, 20, 4, 10, 20, 0])))
    return BEGINNING[:num_alike] + draw(st.sampled_from([[1], [2], [1, 2], [2, 1, 1]]))


ways_in = st.sampled_from(list(WAYS_IN))


@dataclass
class Clients:
    """What was asked for, and what has come back."""

    sequences: dict[tuple[str, int], Expected] = field(default_factory=dict)
    scored: set[str] = field(default_factory=set)
    """Requests whose prompt's log-probabilities have come."""

    def open_ones(self) -> list[tuple[str, int]]:
        return [key for key, expected in self.sequences.items() if not expected.is_over]

    def receive(self, outcome: Outcome) -> None:
        for addressed in outcome.outputs:
            self._take(addressed.output)
        for plain in outcome.plain.values():
            tokens = iter(plain.token_ids)
            for request_id, index, number in zip(plain.request_ids, plain.indices, plain.num_tokens, strict=True):
                self._append(self.sequences[request_id, index], [next(tokens) for _ in range(number)])
            assert next(tokens, None) is None

    def _append(self, expected: Expected, tokens: list[int]) -> None:
        assert not expected.is_over, "an output after the last"
        assert tokens, "an output that says nothing"
        expected.received += tokens
        assert expected.received == expected.output[: len(expected.received)]

    def _take(self, output: SequenceOutput) -> None:
        expected = self.sequences[output.request_id, output.index]
        if output.finish_reason == "error":
            expected.is_over = True  # perhaps before: an impossible request may be aborted before it is answered
            return
        if expected.num_pooled is not None:
            self._take_vector(expected, output)
            return
        if expected.sampling.prompt_logprobs is not None and expected.is_fresh:
            assert (output.prompt_logprobs is not None) is (expected.is_beam or output.request_id not in self.scored)
        if output.prompt_logprobs is not None:
            self.scored.add(output.request_id)
            scores = [None if entry is None else -entry.logprobs[0] for entry in output.prompt_logprobs]
            whole = [None, *range(len(expected.prompt) - 1)]
            assert scores == whole, f"{output.request_id}.{output.index} of {expected.prompt}"
        expected.is_fresh = False
        self._append(expected, output.new_token_ids)
        if expected.sampling.logprobs is not None and not expected.is_beam:
            assert output.logprobs is not None
            assert [entry.token_ids for entry in output.logprobs] == [[token] for token in output.new_token_ids]
        if output.finish_reason is not None:
            assert (expected.received, output.finish_reason) == (expected.output, expected.reason)
            expected.is_over = True

    def _take_vector(self, expected: Expected, output: SequenceOutput) -> None:
        assert not expected.is_over, "an output after the last"
        assert (output.new_token_ids, output.finish_reason) == ([], "stop")
        assert output.pooled is not None
        total, number = struct.unpack("<2f", output.pooled)
        assert expected.num_pooled <= number <= len(expected.prompt)
        assert total == sum(expected.prompt[-int(number) :])
        expected.is_over = True


def expected_output(prompt: list[int], sampling: SamplingParams, seed: int) -> tuple[list[int], str]:
    """(tokens, reason) of a sequence that draws."""
    output = continuation(prompt, min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt)), seed)
    for index, token in enumerate(output):
        if token in sampling.stop_token_ids and index >= sampling.min_tokens:
            return output[: index + 1], "stop"
    return output, "length"


def expected_beams(prompt: list[int], sampling: SamplingParams, beam: BeamSearch) -> list[tuple[list[int], str]]:
    """(tokens, reason) of the hypotheses, best first."""
    num_tokens = min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))
    state = BeamSearchState(beam, frozenset(sampling.stop_token_ids), sampling.min_tokens, num_tokens)
    number = num_candidates(beam.width, len(sampling.stop_token_ids))
    while state.advance([candidates_after([*prompt, *each.output_token_ids], number) for each in state.beams]):
        pass
    return [(list(each.beam.output_token_ids), each.finish_reason) for each in state.hypotheses]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        self.setup = setup
        contents: dict[bytes, list[int]] = {}
        self.reader = EventReader(setup.block_size, setup.groups, contents)
        self.kv = KvCache(
            setup.num_blocks,
            setup.block_size,
            setup.groups,
            enable_prefix_caching=setup.cache,
            event_log=self.reader.log,
        )
        limits = SchedulerLimits(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.most_at_once,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=setup.chunked,
            num_stages=setup.num_stages,
        )
        depth = None if setup.depths is None else VaryingDepth(setup.depths)
        self.scheduler = Scheduler(limits, self.kv, waiting_queue(setup.policy, setup.preemption_threshold), depth)
        self.rank = FakeRank(
            setup.block_size, setup.groups, setup.wrong_drafts, setup.missing_drafts, True, setup.num_blocks,
            tells_drafts=setup.num_stages > 1,
        )  # fmt: skip
        self.agent = FakeAgent(self.rank, contents)
        self.transfers = KvTransfers(self.scheduler, self.agent, HERE, page_bytes=1, fails_requests=False)
        self.earlier_stage = FakeEarlierStage()
        self.flights: deque[Flight] = deque()
        self.clients = Clients()
        self.held: list[str] = []
        self.num_requests = 0

    # --- requests come and go ---

    @rule(
        prompt=prompts(), seeds=st.lists(st.integers(0, 2), min_size=1, max_size=3), num_given=st.integers(0, 3),
        max_tokens=st.integers(1, 14), stop_at=st.integers(0, 14),
        min_tokens=st.integers(0, 3),
        wants=st.sampled_from([(None, None), (None, None), (0, None), (None, 0), (0, 0)]), tenant=st.sampled_from("ab"),
        priority=st.integers(0, 3), way=ways_in,
    )  # fmt: skip
    def add(self, prompt, seeds, num_given, max_tokens, stop_at, min_tokens, wants, tenant, priority, way) -> None:
        """`num_given` tokens of the first sequence were made elsewhere."""
        stops = tuple(continuation(prompt, 10, seeds[0])[stop_at:][:1])
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=0, min_tokens=min_tokens, stop_token_ids=stops, logprobs=wants[0],
            prompt_logprobs=wants[1],
        )  # fmt: skip
        starts, expected = [], []
        for index, seed in enumerate(seeds):
            output, reason = expected_output(prompt, sampling, seed)
            given = output[: min(num_given, len(output) - 1)] if index == 0 else []
            starts.append(SequenceStart(index=index, seed=seed, output_token_ids=given))
            expected.append(Expected(output, reason, list(given), prompt, not given, sampling))
        self._send(prompt, sampling, starts, expected, way, tenant=tenant, priority=priority)

    @rule(
        prompt=prompts(most=10), width=st.integers(2, 3), n=st.integers(1, 2), max_tokens=st.integers(1, 8),
        has_stop=st.booleans(), early=st.sampled_from([False, True, "never"]), wants_scores=st.booleans(), way=ways_in,
    )  # fmt: skip
    def add_beams(self, prompt, width, n, max_tokens, has_stop, early, wants_scores, way) -> None:
        beam = BeamSearch(width=width, early_stopping=early)
        stops = tuple(continuation(prompt, 3)[2:]) if has_stop else ()
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=0, stop_token_ids=stops, prompt_logprobs=0 if wants_scores else None
        )
        hypotheses = expected_beams(prompt, sampling, beam)[:n]
        starts = [SequenceStart(index=index, seed=0) for index in range(len(hypotheses))]
        expected = [Expected(output, reason, [], prompt, True, sampling, True) for output, reason in hypotheses]
        self._send(prompt, sampling, starts, expected, way, beam=beam)

    @rule(
        prompt=prompts(), is_whole=st.booleans(), priority=st.integers(0, 3), way=st.sampled_from(["at once", "held"])
    )
    def add_pooling(self, prompt, is_whole, priority, way) -> None:
        """Of a prompt that is pooled whole no token may be left out, because it is cached."""
        sampling = SamplingParams(max_tokens=0, seed=0)
        expected = Expected([], "stop", [], prompt, True, sampling, num_pooled=len(prompt) if is_whole else 1)
        pooling = Pooling(needs_whole_prompt=is_whole)
        starts = [SequenceStart(index=0, seed=0)]
        self._send(prompt, sampling, starts, [expected], way, priority=priority, pooling=pooling)

    def _send(self, prompt, sampling, starts, expected, way, beam=None, tenant="", priority=0, pooling=None) -> None:
        request_id = f"r{self.num_requests}"
        message = AddRequest(
            request_id=request_id, api_index=self.num_requests % 2, sequences=starts,
            arrival_time=float(self.num_requests // 2),
            spec=RequestSpec(
                prompt_token_ids=prompt, sampling=sampling, tenant=tenant, priority=priority, beam=beam,
                pooling=pooling,
                kv_transfer_params=WAYS_IN[way] if self.setup.cache else None,
            ),
        )  # fmt: skip
        self.num_requests += 1
        self.clients.sequences |= {(request_id, index): each for index, each in enumerate(expected)}
        for each in expected:
            self.agent.learn(prompt + each.output)
        if message.spec.kv_transfer_params is not None:
            self.transfers.add(message, None)
        else:
            self.scheduler.add(message, is_held=way == "held")
        if way == "held":
            self.held.append(request_id)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.scheduler.release(self.held.pop(0))

    @precondition(lambda self: self.clients.open_ones())
    @rule(which=st.integers(0, 20), how=st.sampled_from(["whole", "sequence", "whole", "moved"]))
    def abort(self, which: int, how: str) -> None:
        """`moved`: another engine goes on with the request, and is to find its blocks here."""
        open_ones, expected = self.clients.open_ones(), self.clients.sequences
        request_id, index = open_ones[which % len(open_ones)]
        is_whole = how != "sequence" or expected[request_id, index].is_beam
        if how == "moved" and self.setup.cache:
            self.transfers.keep(request_id)
        self.scheduler.abort(request_id, None if is_whole else index)
        self.transfers.abort(request_id)
        for key in open_ones:
            expected[key].is_over |= key == (request_id, index) or (is_whole and key[0] == request_id)

    @precondition(lambda self: self.setup.cache)
    @rule()
    def forget_prefixes(self) -> None:
        self.scheduler.reset_prefix_cache()

    # --- other engines ---

    @precondition(lambda self: self.agent.pulls)
    @rule(which=st.integers(0, 20), num_blocks=st.integers(0, MAX_MODEL_LEN), then=st.sampled_from(["end", "go on"]))
    def give(self, which: int, num_blocks: int, then: str) -> None:
        """The next so many blocks of a pull; none: there is one fewer than was asked for, if that is to be heard of."""
        request_id, pull = list(self.agent.pulls.items())[which % len(self.agent.pulls)]
        if num_blocks or not self.agent.shorten(request_id):
            self.agent.read(request_id, num_blocks)
            if then == "end" or pull.pages is None:
                self.agent.end_pull(request_id)

    @precondition(lambda self: self.setup.cache)
    @rule(which=st.integers(0, 20), prompt=prompts(), wants_new=st.booleans())
    def take(self, which: int, prompt: list[int], wants_new: bool) -> None:
        """Ask for what is cached, or have what is offered already."""
        if wants_new or not self.agent.offers:
            self.agent.look_up(self.agent.learn(prompt))
        else:
            self.agent.end_offer(list(self.agent.offers)[which % len(self.agent.offers)])

    # --- steps ---

    @precondition(lambda self: len(self.flights) <= self.setup.ahead)
    @rule(num_steps=st.integers(1, MOST_AHEAD + 1))
    def plan_ahead(self, num_steps: int) -> None:
        for _ in range(min(num_steps, self.setup.ahead + 1 - len(self.flights))):
            self.plan()

    def plan(self) -> None:
        says_something = self._plan()
        if self._is_stuck():  # or a search was given up, and others are next
            assert says_something or not self.transfers.holds_pages, "the core sleeps, and nobody wakes it"
            self._plan()
            assert not self._is_stuck(), "the engine could go on and does not"

    def _plan(self) -> bool:
        """Whether any client hears of it."""
        settled = Outcome(outputs=self.transfers.receive())
        plan = self.scheduler.schedule()
        rejected = Outcome(outputs=self.scheduler.take_rejected())
        if plan is not None:
            assert plan.num_tokens <= self.setup.most_at_once
            assert self.setup.num_stages == 1 or not self._sampled_under_way(plan) & set(plan.rows.tolist())
            self.flights.append(Flight(plan))
        self._send_out(settled)
        self._send_out(rejected)
        return bool(settled.outputs or rejected.outputs)

    def _send_out(self, outcome: Outcome) -> None:
        self.transfers.publish(outcome)
        self.clients.receive(outcome)

    def _is_stuck(self) -> bool:
        """Whether somebody waits, and neither a result nor another engine will change that."""
        has_to_go_on = self.scheduler.has_work or any(pull.is_waited_for for pull in self.agent.pulls.values())
        return has_to_go_on and not (self.flights or self.agent.frees_pages or self.agent.has_events)

    def _sampled_under_way(self, newest: StepPlan) -> set[int]:
        """Rows whose next token some other step brings, but for those that have changed hands since."""
        rows: set[int] = set()
        for plan in (*(flight.plan for flight in self.flights), newest):
            rows -= {new.row for new in plan.added} | {fork.target_row for fork in plan.forks}
            if plan is not newest:
                rows |= set(plan.rows[plan.samples].tolist())
        return rows

    @precondition(lambda self: any(flight.result is None for flight in self.flights))
    @rule()
    def compute(self) -> None:
        flight = next(flight for flight in self.flights if flight.result is None)
        flight.result = self.rank.run(flight.plan)
        if self.setup.num_stages > 1:
            assert self.earlier_stage.run(flight.plan) == self.rank.last_computed

    @precondition(lambda self: self.flights and self.flights[0].result is not None)
    @rule()
    def take_result(self) -> None:
        flight = self.flights.popleft()
        assert flight.result is not None
        outcome = Outcome()
        self.scheduler.update(flight.plan, flight.result, outcome)
        self._send_out(outcome)

    @precondition(lambda self: self.flights and self.flights[0].result is None)
    @rule()
    def fail(self) -> None:
        """The step in front, and so all behind it."""
        self.rank.fail(self.flights[0].plan)
        outcome = Outcome()
        self.scheduler.fail(self.flights[0].plan, "device fell over", outcome)
        self.flights.clear()
        self._send_out(outcome)

    @rule(num_steps=st.integers(1, 8))
    def go_on(self, num_steps: int) -> None:
        """As the engine's loop does: plan ahead, compute, take the oldest result."""
        for _ in range(num_steps):
            self._step()

    def _step(self) -> bool:
        """Whether anything happened."""
        num_flights = len(self.flights)
        if num_flights <= self.setup.ahead:
            self.plan()
        has_planned = len(self.flights) > num_flights
        while any(flight.result is None for flight in self.flights):
            self.compute()
        if self.flights and (not has_planned or len(self.flights) > self.setup.ahead):
            self.take_result()
            return True
        return has_planned

    # --- what always holds ---

    @invariant()
    def a_block_is_used_exactly_while_somebody_holds_it(self) -> None:
        assert self.kv.pool.num_used == sum(block.num_references > 0 for block in self.kv.pool.blocks)

    @invariant()
    def readers_of_events_know_the_blocks_that_can_be_found_and_are_written(self) -> None:
        self.reader.read()
        pool, group = self.kv.pool, self.reader.log.group
        found = {block.content[1] for block in pool.blocks if block.content is not None and block.content[0] == group}
        assert set(self.reader.tokens) <= found
        assert self.flights or set(self.reader.tokens) == found
        for block_hash, tokens in self.reader.tokens.items():
            block = pool.find((group, block_hash))
            assert block is not None
            last = (block.block_id, self.setup.block_size - 1)
            assert self.rank.slots[last] == tuple(tokens), "reported before it was written"

    @invariant()
    def the_loop_does_not_sleep_while_somebody_waits(self) -> None:
        if {request_id for request_id, _ in self.clients.open_ones()} - set(self.held) - self.agent.awaited:
            assert self.scheduler.has_work

    def teardown(self) -> None:
        """Everything that is left comes to its end, and leaves nothing behind."""
        if sys.exc_info()[0] is not None or not hasattr(self, "clients"):
            return  # hypothesis takes the machine down after a failure too
        while self.held:
            self.release()
        for step in range(MOST_STEPS * (1 + len(self.clients.open_ones()))):
            if not (self.scheduler.has_work or self.flights or self.agent.is_busy):
                break
            if not self._step() or step % 100 == 99:
                self._let_pages_come_free()
        assert self.clients.open_ones() == [], "these never ended"
        assert self.kv.pool.num_used == 0
        assert not self.agent.is_busy
        assert self.scheduler.num_free_rows == self.setup.max_num_seqs
        assert self.scheduler.stats(0, 0.0).num_waiting == 0

    def _let_pages_come_free(self) -> None:
        """As time passes: a pull ends, and so does the lease of what is there for others as a whole."""
        for request_id in list(self.agent.pulls):
            self.agent.end_pull(request_id)
        for request_id in [request_id for request_id, offer in self.agent.offers.items() if offer.is_complete]:
            self.agent.end_offer(request_id)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings()  # of the profile (conftest.py)


@pytest.mark.slow
class TestSchedulerForLong(SchedulerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=1500, stateful_step_count=60)
