"""An engine's cache and a bad network against what the router believes, in any order.

The engine stores, removes and clears blocks and is restarted; its messages come, are lost, or come twice; replays are
answered from a short memory, or not at all. Whatever happened: once the router has looked, it believes what is true.
"""

from array import array
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_router.prefix_index.block_keys import prompt_keys
from kvasir_router.prefix_index.event_order import Action, Apply, EventOrder, Lost, Replay, Reset
from kvasir_router.prefix_index.index import Held
from kvasir_router.prefix_index.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvasir_router.prefix_index.precise import DOUBT_SECONDS, BlockBudget, PreciseIndex

Path = tuple[int, ...]
"""A block as all blocks up to it; each is one token here."""
URL = "engine"
BUFFER_STEPS = 6
PROMPTS = [(a, b, c) for a in range(2) for b in range(2) for c in range(2)]


class Engine:
    def __init__(self, process: int) -> None:
        self.process = process
        self.cache: set[Path] = set()
        self.num_messages = 0
        self.buffer: deque[int] = deque(maxlen=BUFFER_STEPS)

    def digest(self, path: Path) -> bytes:
        return bytes((self.process % 256, *path))

    def truth(self, prompt: Path) -> int:
        """Leading blocks that it holds."""
        return next((depth for depth in range(3) if prompt[: depth + 1] not in self.cache), 3)


class Following(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.engine = Engine(0)
        self.messages: dict[bytes, Event] = {}  # payload -> event
        self.sent: list[tuple[int, bytes]] = []  # by the process of now
        self.index = PreciseIndex(BlockBudget(1000))
        self.order = EventOrder()
        self.asked: Replay | None = None
        self.perform(self.order.resync())

    # The edge, as a subscriber has it.

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(payload):
                    self.index.apply(URL, self.messages[payload])
                case Reset(is_complete):
                    self.index.reset(URL, is_complete=is_complete)
                case Lost():
                    self.index.doubt(URL, self.now)
                case Replay(start):
                    self.asked = Replay(start)  # not the one before, though it may begin at the same message

    def publish(self, event: Event, *, is_lost: bool) -> None:
        number = self.engine.num_messages
        payload = f"{self.engine.process} {number}".encode()
        self.messages[payload] = event
        self.engine.num_messages += 1
        self.engine.buffer.append(number)
        self.sent.append((number, payload))
        if not is_lost:
            self.perform(self.order.receive(number, payload))

    def answer(self) -> None:
        asked, process = self.asked, self.engine.process
        assert asked is not None
        for number in [number for number in self.engine.buffer if number >= asked.start]:
            self.perform(self.order.replayed(number, f"{process} {number}".encode()))
            if self.asked is not asked:
                return  # that replay was given up
        self.asked = None
        self.perform(self.order.replay_ended())

    def refuse(self) -> None:
        self.asked = None
        self.perform(self.order.replay_failed())

    # What happens.

    @rule(prompt=st.sampled_from(PROMPTS), is_lost=st.booleans())
    def store(self, prompt: Path, is_lost: bool) -> None:
        """The first block of it that is missing."""
        depth = self.engine.truth(prompt)
        path = prompt[: depth + 1]
        if path in self.engine.cache:
            return
        self.engine.cache.add(path)
        parent = self.engine.digest(path[:-1]) if depth else None
        tokens = array("I", path[-1:]).tobytes()
        self.publish(BlockStored([self.engine.digest(path)], parent, tokens, 1), is_lost=is_lost)

    @precondition(lambda self: self.engine.cache)
    @rule(choice=st.integers(0, 100), is_lost=st.booleans())
    def remove(self, choice: int, is_lost: bool) -> None:
        """Any block: its continuations may stay."""
        path = sorted(self.engine.cache)[choice % len(self.engine.cache)]
        self.engine.cache.remove(path)
        self.publish(BlockRemoved([self.engine.digest(path)]), is_lost=is_lost)

    @rule(is_lost=st.booleans())
    def clear(self, is_lost: bool) -> None:
        self.engine.cache.clear()
        self.publish(AllBlocksCleared(), is_lost=is_lost)

    @rule()
    def restart(self) -> None:
        self.engine = Engine(self.engine.process + 1)
        self.sent.clear()
        self.order.disconnected()
        self.perform(self.order.verify())

    @precondition(lambda self: self.sent)
    @rule(choice=st.integers(0, 5))
    def come_twice(self, choice: int) -> None:
        number, payload = self.sent[-1 - choice % len(self.sent)]
        self.perform(self.order.receive(number, payload))

    @precondition(lambda self: self.asked is not None)
    @rule(is_answered=st.booleans())
    def replay(self, is_answered: bool) -> None:
        self.answer() if is_answered else self.refuse()

    @rule()
    def look(self) -> None:
        self.perform(self.order.verify())

    @rule(seconds=st.sampled_from([1.0, DOUBT_SECONDS / 2, DOUBT_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)

    # What must hold.

    @rule()
    def once_the_router_has_looked_it_believes_what_is_true(self) -> None:
        self.perform(self.order.verify())
        self.answer_all()
        if self.index.is_complete(URL):
            assert self.believed() == [self.engine.truth(prompt) for prompt in PROMPTS]
        self.pass_all_doubt()
        self.assert_nothing_is_believed_that_is_not_true()

    @rule()
    def without_replay_the_next_message_bounds_what_is_believed_wrongly(self) -> None:
        while self.asked is not None:
            self.refuse()
        self.publish(BlockRemoved([]), is_lost=False)
        while self.asked is not None:
            self.refuse()
        self.pass_all_doubt()
        self.assert_nothing_is_believed_that_is_not_true()

    @invariant()
    def memory_is_counted(self) -> None:
        assert self.index.num_blocks(URL) <= self.index.num_held <= 1000

    def answer_all(self) -> None:
        while self.asked is not None:
            self.answer()

    def pass_all_doubt(self) -> None:
        self.now += DOUBT_SECONDS
        for _ in range(2):  # what was doubted, and what was void before it
            self.index.expire(self.now)

    def believed(self) -> list[int]:
        chains = ({1: prompt_keys(array("I", prompt).tobytes(), 1, b"")} for prompt in PROMPTS)
        return [self.index.match(chain).get(URL, Held(0)).num_tokens for chain in chains]

    def assert_nothing_is_believed_that_is_not_true(self) -> None:
        for prompt, believed in zip(PROMPTS, self.believed(), strict=True):
            assert believed <= self.engine.truth(prompt)


def test_a_process_whose_only_message_was_lost_is_known_completely_by_the_next_look() -> None:
    """Of the process before it, one message had waited for the replay, and looked like the first of this one."""
    world = Following()
    world.clear(is_lost=False)
    world.restart()
    world.replay(is_answered=True)
    world.store((0, 0, 0), is_lost=True)
    world.once_the_router_has_looked_it_believes_what_is_true()
    assert world.believed() == [world.engine.truth(prompt) for prompt in PROMPTS]
    assert world.index.is_complete(URL)


def test_the_router_looks_again_by_itself_where_a_message_of_a_process_that_is_gone_had_waited() -> None:
    world = Following()
    world.store((0, 0, 0), is_lost=False)
    world.restart()
    world.answer_all()
    assert world.believed() == [0] * len(PROMPTS)
    assert world.index.is_complete(URL)


class FollowingForLong(Following):
    """As the full suite has it."""


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFollowingForLong = pytest.mark.slow(FollowingForLong.TestCase)
TestFollowingForLong.settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)
