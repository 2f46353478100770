"""A router that replays an engine's condensed events believes the same as one that has heard all of them."""

from array import array

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvasir_router.prefix_index.block_keys import prompt_keys
from kvasir_router.prefix_index.kv_events import decode_events
from kvasir_router.prefix_index.precise import BlockBudget, PreciseIndex
from kvasir_runtime.engine.replay_buffer import ReplayBuffer
from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

URL = "engine"
Path = tuple[int, ...]
"""A block as all blocks up to it; each is one token here."""
PROMPTS = [(a, b, c) for a in range(2) for b in range(2) for c in range(2)]


class Reader:
    def __init__(self) -> None:
        self.index = PreciseIndex(BlockBudget(1000))
        self.index.reset(URL, is_complete=True)

    def hear(self, payload: bytes) -> None:
        for event in decode_events(payload).events:
            self.index.apply(URL, event)

    def believes(self) -> list[int]:
        """Of each prompt, how many leading blocks are there."""
        chains = ({1: prompt_keys(array("I", prompt).tobytes(), 1, b"")} for prompt in PROMPTS)
        return [self.index.match(chain).get(URL, 0) for chain in chains]


class Replaying(RuleBasedStateMachine):
    """Blocks may outlive those before them, as behind a window, and these may come back."""

    def __init__(self) -> None:
        super().__init__()
        self.there: set[Path] = set()
        self.buffer = ReplayBuffer(2)
        self.num_batches = 0
        self.witness = Reader()
        self.late: list[Reader] = []

    def publish(self, event: KvEvent) -> None:
        payload = msgspec.msgpack.encode(EventBatch(0.0, [event]))
        self.buffer.append(self.num_batches, payload)
        self.num_batches += 1
        for reader in (self.witness, *self.late):
            reader.hear(payload)

    @rule(prompt=st.sampled_from(PROMPTS))
    def compute(self, prompt: Path) -> None:
        """What is missing of it; each run of blocks is an event."""
        missing = [depth for depth in range(3) if prompt[: depth + 1] not in self.there]
        for depth in missing:
            path = prompt[: depth + 1]
            self.there.add(path)
            self.publish(BlockStored([bytes(path)], bytes(path[:-1]) or None, [path[-1]], 1))

    @precondition(lambda self: not self.there)
    @rule(prompt=st.sampled_from(PROMPTS))
    def compute_at_once(self, prompt: Path) -> None:
        paths = [prompt[: depth + 1] for depth in range(3)]
        self.there.update(paths)
        self.publish(BlockStored([bytes(path) for path in paths], None, list(prompt), 1))

    @precondition(lambda self: self.there)
    @rule(choice=st.integers(0, 100))
    def remove(self, choice: int) -> None:
        path = sorted(self.there)[choice % len(self.there)]
        self.there.remove(path)
        self.publish(BlockRemoved([bytes(path)]))

    @rule()
    def clear(self) -> None:
        self.there.clear()
        self.publish(AllBlocksCleared())

    @rule()
    def come_late(self) -> None:
        reader = Reader()
        for _, payload in self.buffer.since(0):
            reader.hear(payload)
        assert reader.index.num_orphans == 0
        self.late = [*self.late[-2:], reader]

    @rule()
    def all_believe_the_same(self) -> None:
        for reader in self.late:
            assert reader.believes() == self.witness.believes()
            assert reader.index.num_held == self.witness.index.num_held


TestReplaying = Replaying.TestCase
TestReplaying.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
