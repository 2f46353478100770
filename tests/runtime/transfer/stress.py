"""Requests at random over a prefill and a decode engine whose peers, reads and clients fail at random.

    python -m tests.runtime.transfer.stress 10000 [RANKS [DATA_RANKS]]

runs as many, over engines of so many tensor and data-parallel ranks (from the repository's root, PYTHONPATH as in
pyproject.toml), and says what became of them.
"""

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

from tests.runtime.scheduling.fake_rank import continuation
from tests.runtime.transfer.simulation import FULL, Engine, World, from_cache_of, to_decode, to_prefill

from kvasir_runtime.kv_cache.spec import KvGroup

MOST_AT_ONCE = 8
STEMS = [list(range(start, start + 40)) for start in (100, 200, 300)]


@dataclass
class Client:
    number: int
    prompt: list[int]
    form: str
    max_tokens: int
    leaves: bool
    is_gone: bool = False
    decode: Engine | None = None
    """None: the first leg's answer is awaited."""
    prefill: Engine | None = None


class Stress:
    def __init__(
        self, seed: int, num_requests: int, *, checksums: bool = True, num_ranks: int = 1,
        num_data_ranks: int = 1, groups: tuple[KvGroup, ...] = FULL,
    ) -> None:  # fmt: skip
        self.world = World(seed)
        self.rng = random.Random(seed)
        self.num_left = num_requests
        self.checksums = checksums
        self.num_ranks = num_ranks
        self.num_data_ranks = num_data_ranks
        self.groups = groups
        self.num_made = 0
        self.clients: list[Client] = []
        self.outcomes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.prefills = self._ranks("p")
        self.decodes = self._ranks("d")

    def run(self) -> None:
        """Until every client has its answer or has left, and every lease has ended."""
        while self.num_left or self.clients:
            if self.num_left and len(self.clients) < MOST_AT_ONCE and self.rng.random() < 0.5:
                self._arrive()
            self._disturb()
            self.world.turn(self.rng.choice((0.01, 0.05, 0.3)))
            for client in list(self.clients):
                self._go_on(client)
        everybody = [*self.prefills, *self.decodes]
        for engine in everybody:
            self._calm(engine)
        self.world.settle()
        if self.num_ranks > 1:
            self._await_threads(everybody)
        self._bury(*everybody)
        assert not any(engine.kv.pool.num_used for engine in everybody), "blocks are stranded"

    def _await_threads(self, engines: list[Engine]) -> None:
        """Ranks' threads end reads in time of the wall, of which the settled time may have taken next to nothing."""
        deadline = time.monotonic() + 20
        while any(engine.kv.pool.num_used for engine in engines) and time.monotonic() < deadline:
            self.world.turn()

    def _ranks(self, name: str) -> list[Engine]:
        """Data-parallel ones, of one engine."""
        return [self._engine(name, data_rank) for data_rank in range(self.num_data_ranks)]

    def _engine(self, name: str, data_rank: int) -> Engine:
        engine = self.world.engine(
            name, num_blocks=len(self.groups) * self.rng.choice((20, 40, 64)), budget=self.rng.choice((5, 16, 64)),
            ahead=self.rng.choice((0, 0, 2)), checksums=self.checksums, lease_seconds=2.0,
            num_ranks=self.num_ranks, groups=self.groups, data_rank=data_rank,
        )  # fmt: skip
        self._disturb_reads(engine)
        return engine

    def _disturb_reads(self, engine: Engine) -> None:
        for part in engine.parts:
            part.chance_to_end = self.rng.choice((0.2, 1.0))
            part.chance_to_fail = self.rng.choice((0.0, 0.2))
            if self.checksums:  # without, damage goes unnoticed
                part.chance_of_damage = self.rng.choice((0.0, 0.05))

    def _arrive(self) -> None:
        self.num_left -= 1
        self.num_made += 1
        stem = self.rng.choice(STEMS)[: self.rng.randint(1, 40)]
        prompt = stem + [self.rng.randint(500, 900) for _ in range(self.rng.randint(0, 8))]
        client = Client(
            self.num_made, prompt, self.rng.choice(("together", "together", "in turn", "from cache")),
            self.rng.randint(1, 8), leaves=self.rng.random() < 0.2,
        )  # fmt: skip
        self.clients.append(client)
        if client.form != "from cache":
            client.prefill = self._one_of(self.prefills)
            params = to_prefill(f"t{client.number}" if client.form == "together" else None)
            client.prefill.add(f"p{client.number}", prompt, params, max_tokens=1)
        if client.form == "together":
            self._decode(client, to_decode("p", f"t{client.number}"))
        elif client.form == "from cache":
            self._decode(client, from_cache_of("p", self._one_of(self.prefills).line.port))

    def _decode(self, client: Client, params) -> None:
        client.decode = self._one_of(self.decodes)
        client.decode.add(f"d{client.number}", client.prompt, params, max_tokens=client.max_tokens)

    def _one_of(self, ranks: list[Engine]) -> Engine:
        return ranks[0] if len(ranks) == 1 else self.rng.choice(ranks)

    def _go_on(self, client: Client) -> None:
        if client.leaves and self.rng.random() < 0.1:
            self._leave(client)
        elif client.decode is None:
            self._hand_over(client)
        elif client.decode.line.is_dead:
            self._end(client, "engine died")
        elif (end := client.decode.ended.get(f"d{client.number}")) is not None:
            tokens = client.decode.tokens[f"d{client.number}"]
            if end.finish_reason == "error":
                self._end(client, "step failed")
            else:
                assert tokens == continuation(client.prompt, client.max_tokens), (
                    f"client {client.number} got wrong tokens"
                )
                self._end(client, "answered")

    def _hand_over(self, client: Client) -> None:
        """A router, once the first leg has answered, or broken off."""
        assert client.prefill is not None
        end = client.prefill.ended.get(f"p{client.number}")
        if end is not None and end.kv_transfer_params is not None:
            self._decode(client, end.kv_transfer_params)
        elif end is not None or client.prefill.line.is_dead:
            self._decode(client, None)

    def _leave(self, client: Client) -> None:
        """The router aborts both legs."""
        for engine, request_id in ((client.prefill, f"p{client.number}"), (client.decode, f"d{client.number}")):
            if engine is not None and not engine.line.is_dead:
                engine.abort(request_id)
        self._end(client, "left")

    def _end(self, client: Client, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self.clients.remove(client)

    def _disturb(self) -> None:
        event = self.rng.random()
        if event < 0.004:
            self._kill(self.prefills)
            self.prefills = self._ranks("p")
        elif event < 0.006:
            self._kill(self.decodes)
            self.decodes = self._ranks("d")
        elif event < 0.014:
            self._one_of(self.prefills).fail_step()
        elif event < 0.016:
            self._one_of(self.decodes).fail_step()
        elif event < 0.020:
            self.rng.choice((*self.prefills, *self.decodes)).line.is_silent = True
        elif event < 0.026:
            self._disturb_reads(self._one_of(self.decodes))
        elif event < 0.06:
            for engine in (*self.prefills, *self.decodes):
                engine.line.is_silent = False

    def _kill(self, ranks: list[Engine]) -> None:
        """They die together; others come at their addresses."""
        for engine in ranks:
            engine.die()
        self._bury(*ranks)

    def _calm(self, engine: Engine) -> None:
        engine.line.is_silent = False
        for part in engine.parts:
            part.chance_to_end = 1.0

    def _bury(self, *engines: Engine) -> None:
        for engine in engines:
            self.failures += Counter(engine.agent.stats(0).num_failures)
            self.world.engines.remove(engine)
            engine.bury()


if __name__ == "__main__":
    began = time.monotonic()
    num_requests, num_ranks, num_data_ranks = (int(text) for text in [*sys.argv[1:], "1", "1"][:3])
    stress = Stress(0, num_requests, num_ranks=num_ranks, num_data_ranks=num_data_ranks)
    stress.run()
    seconds = time.monotonic() - began
    ranks = f"{num_data_ranks} x {num_ranks} ranks"
    print(f"{num_requests} requests over {ranks} in {seconds:.1f} s, every block free on both sides")
    print("requests:", dict(stress.outcomes))
    print("pulls that failed:", dict(stress.failures))
