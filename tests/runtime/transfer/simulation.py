"""Engines that exchange KV without a thread, a socket or a model: the real scheduler, core side and transfer agent over
a rank that is pure arithmetic (fake_rank.py), a network in memory, and reads that end when the simulation says so.

A slot of the rank holds the tokens up to its position, so KV that is pulled from the wrong block, too early, too late
or damaged is read as an error, unless the protocol noticed.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
from tests.runtime.scheduling.fake_rank import GARBAGE, FakeRank
from tests.runtime.transfer.simulated_ranks import AskedRanks, TensorRanks

from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.errors import KvTransferError
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import Outcome, SequenceOutput
from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.scheduling.step import SchedulerLimits, StepPlan, StepResult
from kvasir_runtime.scheduling.waiting import waiting_queue
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import Place
from kvasir_runtime.transfer.connector import Page
from kvasir_runtime.transfer.messages import FromKeeper, FromPuller, Identity, Region
from kvasir_runtime.transfer.params import KvTransferParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
IDENTITY = Identity(
    model="m", revision="1", dtype="float32", block_size=BLOCK_SIZE, kv_layout="l", pipeline_cut=[2], hash_rule="h"
)
FULL = (KvGroup((0,)),)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Network:
    """Every engine's mailbox; messages are encoded as on the wire."""

    def __init__(self) -> None:
        self.engines: dict[tuple[str, int], Line] = {}

    def line(self, host: str, port: int) -> "Line":
        """A new engine at the address; one that was there is dead."""
        line = self.engines[host, port] = Line(self, (host, port))
        return line


class Line:
    """One engine's side channel."""

    def __init__(self, network: Network, endpoint: tuple[str, int]) -> None:
        self._network = network
        self._endpoint = endpoint
        self.port = endpoint[1]
        self.connected: dict[tuple[str, int], Line] = {}
        self.questions: deque[tuple[bytes, bytes]] = deque()
        self.answers: deque[tuple[tuple[str, int], bytes]] = deque()
        self.is_dead = False
        self.is_silent = False
        """Nothing leaves it, and nobody is told."""

    def wake(self) -> None: ...

    def poll(self, timeout_seconds: float | None) -> None: ...

    def asked(self) -> list[tuple[bytes, FromPuller]]:
        got = [(puller, msgspec.msgpack.decode(payload, type=FromPuller)) for puller, payload in self.questions]
        self.questions.clear()
        return got

    def answered(self) -> list[tuple[tuple[str, int], FromKeeper]]:
        got = [(place, msgspec.msgpack.decode(payload, type=FromKeeper)) for place, payload in self.answers]
        self.answers.clear()
        return got

    def lost(self) -> list[tuple[str, int]]:
        return [endpoint for endpoint, line in self.connected.items() if line.is_dead]

    def ask(self, endpoint: tuple[str, int], message: FromPuller) -> None:
        line = self.connected.setdefault(endpoint, self._network.engines[endpoint])
        if not (line.is_dead or self.is_silent):
            line.questions.append((msgspec.msgpack.encode(self._endpoint), msgspec.msgpack.encode(message)))

    def answer(self, puller: bytes, message: FromKeeper) -> None:
        line = self._network.engines[msgspec.msgpack.decode(puller, type=tuple[str, int])]
        if not (line.is_dead or self.is_silent) and line.connected.get(self._endpoint) is self:
            line.answers.append((self._endpoint, msgspec.msgpack.encode(message)))

    def hang_up(self, endpoint: tuple[str, int]) -> None:
        self.connected.pop(endpoint, None)


@dataclass
class SimulatedRead:
    source: FakeRank
    pairs: list
    is_cancelled: bool = False


class RankConnector:
    """Reads slots of one rank into another's."""

    def __init__(
        self, name: str, rank: FakeRank, ranks: dict[bytes, FakeRank], rng: random.Random, index: int = 0
    ) -> None:
        """`index`: of the rank among its engine's."""
        self._index = index
        self._rank = rank
        self._ranks = ranks
        self._rng = rng
        self._name = name.encode()
        self._peers: dict[str, FakeRank] = {}
        self._reads: dict[int, SimulatedRead] = {}
        self.num_reads = 0
        self.read_blocks: list[int] = []
        """Of each read, how many pages."""
        self.chance_to_end = 1.0
        self.chance_to_fail = 0.0
        self.chance_of_damage = 0.0
        ranks[self._name] = rank

    def regions(self) -> list[Region]:
        return [Region(self._name, 0, 1, 0)]

    def add_peer(self, engine_id: str, regions: list[Region]) -> None:
        self._peers[engine_id] = self._ranks[regions[self._index].agent_metadata]

    def remove_peer(self, engine_id: str) -> None:
        assert not any(read.source is self._peers.get(engine_id) for read in self._reads.values()), "it is read from"
        self._peers.pop(engine_id, None)

    def start_read(self, engine_id: str, pairs: list) -> int:
        if engine_id not in self._peers:
            raise KvTransferError(f"{engine_id} is not known")
        self.num_reads += 1
        self.read_blocks.append(len(pairs))
        self._reads[self.num_reads] = SimulatedRead(self._peers[engine_id], list(pairs))
        return self.num_reads

    def state(self, read: int) -> str:
        if self._rng.random() >= self.chance_to_end:
            return "reading"
        running = self._reads.pop(read)
        has_failed = self._rng.random() < self.chance_to_fail
        for pair in running.pairs[: len(running.pairs) // 2 if has_failed else None]:
            self._copy(running.source, pair.theirs, pair.ours)
        return "failed" if has_failed else "done"

    def _copy(self, source: FakeRank, theirs: int, ours: int) -> None:
        is_damaged = self._rng.random() < self.chance_of_damage
        for offset in range(BLOCK_SIZE):
            held = GARBAGE if is_damaged else source.slots.get((theirs, offset))
            self._rank.slots.pop((ours, offset), None)
            if held is not None:
                self._rank.slots[ours, offset] = held

    def cancel(self, read: int) -> None:
        self._reads[read].is_cancelled = True

    def progress(self) -> None: ...

    def checksums(self, pages: list[Page], num_ranks: int, side: str) -> list[int]:
        return [
            hash(tuple(self._rank.slots.get((page.block_id, offset)) for offset in range(BLOCK_SIZE))) % 2**63
            for page in pages
        ]

    def close(self) -> None: ...


@dataclass
class Engine:
    """One engine's core, stepped by hand."""

    name: str
    scheduler: Scheduler
    kv: KvCache
    rank: FakeRank | TensorRanks
    transfers: KvTransfers
    agent: TransferAgent
    parts: list[RankConnector]
    """Of each rank."""
    line: Line
    ahead: int = 0
    prefill_tokens_per_second: float | None = None
    under_way: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[SequenceOutput] = field(default_factory=list)
    ended: dict[str, SequenceOutput] = field(default_factory=dict)
    asked: AskedRanks | None = None
    """None: of one rank, whose connector is the agent's."""

    @property
    def connector(self) -> RankConnector:
        """Of the only rank."""
        [connector] = self.parts
        return connector

    def add(self, request_id: str, prompt: list[int], params: KvTransferParams | None = None, max_tokens: int = 6,
            so_far: list[int] | None = None, beam: BeamSearch | None = None, **sampling: object) -> None:  # fmt: skip
        message = AddRequest(
            request_id=request_id, api_index=0, arrival_time=0.0,
            sequences=[SequenceStart(index=0, seed=0, output_token_ids=so_far or [])],
            spec=RequestSpec(
                prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
                kv_transfer_params=params, beam=beam,
            ),
        )  # fmt: skip
        self.tokens[request_id] = []
        if params is None:
            self.scheduler.add(message)
        else:
            self.transfers.add(message, self.prefill_tokens_per_second)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.transfers.abort(request_id)

    def turn(self) -> None:
        """One of the agent and one of the core."""
        self.agent.turn()
        outcome = Outcome(outputs=self.transfers.receive())
        plan = self.scheduler.schedule()
        if plan is not None:
            self.under_way.append((plan, self.rank.run(plan)))
        outcome.outputs += self.scheduler.take_rejected()
        if self.under_way and (plan is None or len(self.under_way) > self.ahead):
            self.scheduler.update(*self.under_way.popleft(), outcome)
        self.transfers.publish(outcome)
        self._receive(outcome)

    def fail_step(self) -> None:
        """The oldest step under way could not be computed, nor any behind it."""
        if self.under_way:
            plan, _ = self.under_way[0]
            self.under_way.clear()
            outcome = Outcome()
            self.scheduler.fail(plan, "device fell over", outcome)
            self.transfers.publish(outcome)
            self._receive(outcome)

    def die(self) -> None:
        self.line.is_dead = True

    def bury(self) -> None:
        """Nothing of it is used any more."""
        if self.asked is not None:
            self.asked.end()

    def _receive(self, outcome: Outcome) -> None:
        for addressed in outcome.outputs:
            output = addressed.output
            self.outputs.append(output)
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output
        for plain in outcome.plain.values():
            tokens = iter(plain.token_ids)
            for request_id, number in zip(plain.request_ids, plain.num_tokens, strict=True):
                self.tokens[request_id] += [next(tokens) for _ in range(number)]


class World:
    """Engines by name, one clock and one network."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.network = Network()
        self.ranks: dict[bytes, FakeRank] = {}
        self.engines: list[Engine] = []
        self.num_made = 0

    def engine(
        self,
        name: str,
        *,
        num_blocks: int = 64,
        budget: int = 16,
        max_num_seqs: int = 8,
        num_ranks: int = 1,
        ahead: int = 0,
        checksums: bool = True,
        lease_seconds: float = 5.0,
        timeout_seconds: float = 10.0,
        fails_requests: bool = False,
        groups: tuple[KvGroup, ...] = FULL,
        identity: Identity = IDENTITY,
        data_rank: int = 0,
    ) -> Engine:
        """`data_rank`: of one beside others of this name; rank 0 is the one that is asked first."""
        self.num_made += 1
        engine_id = f"{name}-{self.num_made}"
        kv = KvCache(num_blocks, BLOCK_SIZE, groups, enable_prefix_caching=True)
        limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN)
        scheduler = Scheduler(limits, kv, waiting_queue("fcfs"))
        ranks = [FakeRank(BLOCK_SIZE, groups) for _ in range(num_ranks)]
        parts = [
            RankConnector(f"{engine_id}-{index}", rank, self.ranks, self.rng, index) for index, rank in enumerate(ranks)
        ]
        asked = AskedRanks(parts) if num_ranks > 1 else None
        line = self.network.line(name, 1 + data_rank)
        place = Place(engine_id=engine_id, host=name, port=1 + data_rank, tensor_size=num_ranks)
        agent = TransferAgent(
            parts[0] if asked is None else asked.connector,
            line,
            identity,
            place,
            page_bytes=1,
            lease_seconds=lease_seconds,
            timeout_seconds=timeout_seconds,
            checksums=checksums,
            wake_core=lambda: None,
            front=(name, 1) if data_rank else None,
            clock=self.clock,
        )
        transfers = KvTransfers(scheduler, agent, place, page_bytes=1, fails_requests=fails_requests)
        rank = ranks[0] if asked is None else TensorRanks(ranks)
        engine = Engine(name, scheduler, kv, rank, transfers, agent, parts, line, ahead, asked=asked)
        self.engines.append(engine)
        return engine

    def turn(self, seconds: float = 0.05) -> None:
        self.clock.now += seconds
        for engine in self.engines:
            if not engine.line.is_dead:
                engine.turn()

    def run(self, engine: Engine, *request_ids: str) -> None:
        """Until all of them have ended there."""
        for _ in range(2000):
            if all(request_id in engine.ended for request_id in request_ids):
                return
            self.turn()
        raise AssertionError(f"{[one for one in request_ids if one not in engine.ended]} never ended")

    def settle(self, seconds: float = 20.0) -> None:
        """Let everything that is left end, leases included."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.turn(0.2)


def to_prefill(transfer_id: str | None = None) -> KvTransferParams:
    return KvTransferParams(do_remote_decode=True, transfer_id=transfer_id)


def to_decode(host: str, transfer_id: str) -> KvTransferParams:
    return KvTransferParams(do_remote_prefill=True, remote_host=host, remote_port=1, transfer_id=transfer_id)


def from_cache_of(host: str, port: int = 1) -> KvTransferParams:
    return KvTransferParams(do_remote_prefill=True, remote_host=host, remote_port=port)
