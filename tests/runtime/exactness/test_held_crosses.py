"""Every kind of answer that clients ask for, in every way that an engine may take: token for token what the plain
engine says. A diagonal of the table is quick; `make test-full` has all of it, in both dtypes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.conftest import (
    DTYPES,
    MAX_NUM_SEQS,
    PLAIN,
    Dtype,
    Engine,
    Features,
    engine_over,
    starting_engines,
)
from tests.runtime.exactness.held_answers import ASKED, DRAWN, HELD, PROMPT, SEEDS
from tests.runtime.exactness.rank_threads import start_ranks
from tests.runtime.exactness.repeating_heads import REPEATING_HEADS
from tests.runtime.exactness.speculators import speculative_config
from tests.runtime.exactness.transfers import Transfers

from kvasir_runtime.engine.core_main import draft_depth
from kvasir_runtime.transfer.params import KvTransferParams

Answers = list[list[int]]
"""Tokens of the greedy sequence, and of those that are drawn."""
CACHED = Features(prefix_cache=True, chunked=True)
ALL = Features(prefix_cache=True, few_blocks=True, chunked=True, three_steps_ahead=True)
ON_RANKS = replace(ALL, three_steps_ahead=False, one_step_ahead=True)


@dataclass(frozen=True)
class Way:
    quick: str
    """The kind of answer that the short suite crosses it with, for which it really is taken."""
    features: Features = PLAIN
    method: str | None = None
    is_resumed: bool = False
    """Another engine has begun each answer."""
    is_split: bool = False
    """Another engine computes the prompt."""
    tensor_size: int = 1
    num_stages: int = 1


WAYS = {
    "ngram": Way("json_schema", method="ngram"),
    "suffix": Way("json_object", method="suffix"),
    "draft_model": Way("regex", method="draft_model"),
    "medusa": Way("thought, schema", method="medusa"),
    "eagle": Way("budget", method="eagle"),
    "eagle3": Way("structural tag", method="eagle3"),
    "preempted": Way("tools required", Features(few_blocks=True)),
    "resumed": Way("ebnf", is_resumed=True),
    "chunked": Way("choice", CACHED),
    "one step ahead": Way("tools auto", Features(one_step_ahead=True)),
    "three steps ahead": Way("schema or calls", Features(three_steps_ahead=True)),
    "split": Way("thought or none, regex", CACHED, is_split=True),
    "TP 2": Way("thought, calls", ON_RANKS, tensor_size=2),
    "PP 2": Way("tool named", ALL, num_stages=2),
    "ngram, all": Way("json_object", ALL, "ngram", is_resumed=True),
    "draft_model, all": Way("budget, schema", ALL, "draft_model", is_resumed=True),
    "eagle3, all": Way("budget in pieces, schema", ALL, "eagle3", is_resumed=True),
    "ngram, split": Way("budget in pieces, calls", replace(CACHED, three_steps_ahead=True), "ngram", is_split=True),
    "draft_model, TP 2": Way("tools required, between marks", ON_RANKS, "draft_model", is_resumed=True, tensor_size=2),
    "eagle3, PP 2": Way("json_object", ALL, "eagle3", is_resumed=True, num_stages=2),
}
assert {way.quick for way in WAYS.values()} == HELD.keys()


def crosses() -> Iterator[Any]:
    for name, way in WAYS.items():
        for dtype in DTYPES:
            for kind in HELD:
                marks = [] if dtype == "bfloat16" and kind == way.quick else [pytest.mark.slow]
                yield pytest.param((name, dtype), kind, id=f"{kind}-{name}-{dtype}", marks=marks)


@dataclass
class Served:
    """An engine that takes one way, with all that belongs to it, and the plain one whose answers it must give."""

    way: Way
    engine: Engine
    twin: Engine
    prefill: Engine | None
    plain: dict[str, Answers] = field(default_factory=dict)

    def answers(self, kind: str) -> Answers:
        """The plain engine's."""
        if kind not in self.plain:
            for name, asked in self._asked(kind):
                self.twin.add(name, PROMPT, **asked)
            self.plain[kind] = tokens_of(self.twin, kind)
        return self.plain[kind]

    def check(self, kind: str, cut: int) -> None:
        """With so many tokens of each that there are already."""
        whole = self.answers(kind)
        begun = [tokens[:cut] for tokens in whole]
        for name, asked in self._asked(kind, str(cut)):
            outputs = begun[1:] if "drawn" in name else begun[:1]
            params = self._computed_elsewhere(name, asked)
            salt = {"cache_salt": name} if self.way.is_split else {}
            self.engine.add(name, PROMPT, outputs=outputs, kv_transfer_params=params, **asked, **salt)
        assert tokens_of(self.engine, kind, str(cut)) == [tokens[cut:] for tokens in whole]

    def _asked(self, kind: str, suffix: str = "") -> list[tuple[str, dict[str, Any]]]:
        of_kind = ASKED | HELD[kind]
        return [
            (f"{kind}{suffix}", of_kind | {"seeds": (1,)}),
            (f"{kind}{suffix} drawn", of_kind | DRAWN | {"seeds": SEEDS}),
        ]

    def _computed_elsewhere(self, name: str, asked: dict[str, Any]) -> KvTransferParams | None:
        if self.prefill is None:
            return None
        alone = asked | {"max_tokens": 1, "seeds": (1,), "cache_salt": name}
        wanted = KvTransferParams(do_remote_decode=True)
        self.prefill.add(name, PROMPT, kv_transfer_params=wanted, **alone)
        return self.prefill.finish(name).outputs[name][-1].kv_transfer_params


def tokens_of(engine: Engine, kind: str, suffix: str = "") -> Answers:
    names = [f"{kind}{suffix}", f"{kind}{suffix} drawn", f"{kind}{suffix} drawn.1"]
    generated = engine.finish(*names)
    return [generated.token_ids(name) for name in names]


@pytest.fixture(scope="module")
def twins(
    random_model: Callable[[str, Dtype], Path],
) -> Iterator[Callable[[Dtype], tuple[Engine, dict[str, Answers]]]]:
    """Plain engines, with what they have said."""
    with starting_engines() as start:
        made: dict[Dtype, tuple[Engine, dict[str, Answers]]] = {}

        def of(dtype: Dtype) -> tuple[Engine, dict[str, Answers]]:
            if dtype not in made:
                made[dtype] = start(random_model("LlamaForCausalLM", dtype)), {}
            return made[dtype]

        yield of


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    random_model: Callable[[str, Dtype], Path],
    twins: Callable[[Dtype], tuple[Engine, dict[str, Answers]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Shared by all kinds of answers. Ranks that share layers add up in another order than one does, so that in
    bfloat16 they are compared with themselves, with nothing else on."""
    name, dtype = request.param
    way, model, folder = WAYS[name], random_model("LlamaForCausalLM", dtype), tmp_path_factory.mktemp("way")
    config = None
    if way.method is not None:
        config = speculative_config(way.method, model, model, folder / "heads", REPEATING_HEADS)
    twin, plain = twins(dtype)
    prefill = None
    with ExitStack() as stack:
        if way.tensor_size * way.num_stages > 1:
            ranks = start_ranks(model, folder, way.tensor_size, num_stages=way.num_stages, speculative_config=config)
            stack.callback(ranks.close)
            rank, depth = ranks.workers[-1].description, draft_depth(config, MAX_NUM_SEQS)
            engine = engine_over(ranks, rank, way.features, depth, way.num_stages)
            if way.tensor_size > 1 and dtype == "bfloat16":
                twin, plain = engine_over(ranks, rank, PLAIN, None, way.num_stages), {}
        else:
            start = stack.enter_context(starting_engines())
            transfers = Transfers(stack, folder) if way.is_split else None
            if way.is_split:
                prefill = start(model, way.features, make_transfers=transfers)
            engine = start(model, way.features, make_transfers=transfers, speculative_config=config)
        yield Served(way, engine, twin, prefill, plain)


def check_taken(way: Way, engine: Engine) -> None:
    """That the engine did what the way says."""
    stats = engine.channel.stats
    assert stats is not None
    assert (stats.num_draft_tokens > 0) == (way.method is not None)
    assert (stats.num_preemptions > 0) == way.features.few_blocks
    if way.is_split:
        assert stats.transfers is not None
        assert stats.transfers.num_blocks_received > 0


@pytest.mark.parametrize(("served", "kind"), crosses(), indirect=["served"])
def test_an_answer_is_the_plain_engines(served: Served, kind: str) -> None:
    shortest = min(map(len, served.answers(kind)))
    for cut in sorted({1, shortest // 2, shortest - 1}) if served.way.is_resumed else (0,):
        served.check(kind, cut)
    if kind == served.way.quick:
        check_taken(served.way, served.engine)
