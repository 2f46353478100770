"""Prompts computed by one real engine and continued by another, their KV moved by NIXL: greedy output is Hugging
Face's, token for token."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.all_kinds import HELD, HELD_SEEDS, WORDS
from tests.runtime.exactness.conftest import Dtype, Engine, EngineFactory, Features, Generated, Reference, engine_over
from tests.runtime.exactness.rank_threads import start_ranks
from tests.runtime.exactness.transfers import Transfers
from torch import Tensor

from kvasir_runtime.config import SpeculativeConfig
from kvasir_runtime.transfer.connector import PagePair, ReadState
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.page_layout import PageParts
from kvasir_runtime.transfer.params import KvTransferParams

RankedFactory = Callable[..., Engine]


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    with ExitStack() as stack:
        yield Transfers(stack, tmp_path)


SCORED = ("request-1", "request-4")
"""Of which log-probabilities are asked for where a prompt's KV has come."""
CACHED = Features(prefix_cache=True)
CHUNKED = Features(prefix_cache=True, chunked=True)
AHEAD = Features(prefix_cache=True, chunked=True, three_steps_ahead=True)
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)


@pytest.mark.parametrize(
    ("architecture", "dtype", "features", "speculative"),
    [
        ("LlamaForCausalLM", "bfloat16", CHUNKED, None),
        ("LlamaForCausalLM", "float32", CHUNKED, None),
        ("Gemma3ForCausalLM", "bfloat16", AHEAD, None),  # windows: two KV groups
        ("MistralForCausalLM", "bfloat16", CACHED, DRAFTS),
    ],
)
def test_output_is_that_of_one_engine(
    reference: Callable[[str, Dtype], Reference], start_engine: EngineFactory, transfers: Transfers,
    architecture: str, dtype: Dtype, features: Features, speculative: SpeculativeConfig | None,
) -> None:  # fmt: skip
    model = reference(architecture, dtype)
    prefill = start_engine(model.folder, features, make_transfers=transfers)
    decode = start_engine(model.folder, features, make_transfers=transfers, speculative_config=speculative)
    check_split(model, prefill, decode)


@pytest.fixture
def start_ranked(transfers: Transfers, tmp_path: Path) -> Iterator[RankedFactory]:
    """Makes an engine of so many ranks a stage, and so many stages."""
    with ExitStack() as stack:

        def start(model: Path, tensor_size: int = 1, num_stages: int = 2, **options: Any) -> Engine:
            folder = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            ranks = start_ranks(model, folder, tensor_size, num_stages=num_stages, **options)
            stack.callback(ranks.close)
            own = partial(transfers.of_ranks, ranks.workers, ranks.groups[0].place.topology)
            rank = ranks.workers[-1].description
            return engine_over(ranks, rank, CHUNKED, None, num_stages, make_transfers=own)

        yield start


@pytest.mark.parametrize(
    ("architecture", "num_prefill_ranks", "num_decode_ranks"),
    [
        ("LlamaForCausalLM", 2, 1),
        ("Gemma3ForCausalLM", 1, 2),  # two KV groups
        ("LlamaForCausalLM", 2, 2),
        ("LlamaForCausalLM", 4, 1),  # two KV heads: two ranks keep the same
    ],
)
def test_ranks_take_their_heads_from_the_ranks_that_have_them(
    reference: Callable[[str], Reference], start_engine: EngineFactory, start_ranked: RankedFactory,
    transfers: Transfers, architecture: str, num_prefill_ranks: int, num_decode_ranks: int,
) -> None:  # fmt: skip
    model = reference(architecture)

    def start(size: int) -> Engine:
        if size == 1:
            return start_engine(model.folder, CHUNKED, make_transfers=transfers)
        return start_ranked(model.folder, size, num_stages=1)

    check_split(model, start(num_prefill_ranks), start(num_decode_ranks))


@pytest.mark.parametrize(
    ("architecture", "num_prefill_ranks", "num_decode_ranks"),
    [
        ("LlamaForCausalLM", 1, 1),
        ("Gemma3ForCausalLM", 1, 1),  # three KV groups, of which each stage has layers in two or one
        ("LlamaForCausalLM", 2, 1),
        ("Gemma3ForCausalLM", 1, 2),
    ],
)
def test_stages_take_the_kv_of_their_layers_from_the_same_stage(
    reference: Callable[[str], Reference], start_ranked: RankedFactory,
    architecture: str, num_prefill_ranks: int, num_decode_ranks: int,
) -> None:  # fmt: skip
    model = reference(architecture)
    prefill, decode = (start_ranked(model.folder, size) for size in (num_prefill_ranks, num_decode_ranks))
    check_split(model, prefill, decode)
    for engine in (prefill, decode):
        engine.step_until(lambda engine=engine: engine.num_blocks_used == 0)


def test_stages_go_on_while_blocks_are_kept_that_nobody_has_fetched(
    reference: Callable[[str], Reference], start_ranked: RankedFactory
) -> None:
    """A sequence is on one stage at a time, so that its next step cannot be planned before its result is here."""
    model = reference("LlamaForCausalLM")
    engine = start_ranked(model.folder)
    engine.add("kept", model.prompts[2], kv_transfer_params=KvTransferParams(do_remote_decode=True), max_tokens=1)
    engine.finish("kept")
    engine.add("goes on", model.prompts[3])
    assert engine.finish("goes on").token_ids("goes on") == model.outputs[3]
    assert engine.num_blocks_used > 0, "the lease has ended, and so nothing was shown"


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_an_answer_follows_its_grammar_from_where_its_prompt_was_computed(
    reference: Callable[[str], Reference], start_engine: EngineFactory, transfers: Transfers,
    speculative: SpeculativeConfig | None,
) -> None:  # fmt: skip
    model = reference("LlamaForCausalLM")
    prompt, names, asked = model.prompts[2], ["held", "held.1"], HELD | {"max_tokens": 60}
    alone = start_engine(model.folder)
    alone.add("held", prompt, seeds=HELD_SEEDS, **asked)
    expected = alone.finish(*names)
    prefill = start_engine(model.folder, CHUNKED, make_transfers=transfers)
    decode = start_engine(model.folder, CHUNKED, make_transfers=transfers, speculative_config=speculative)
    prefill.add("held", prompt, kv_transfer_params=KvTransferParams(do_remote_decode=True), **asked | {"max_tokens": 1})
    to_decode = prefill.finish("held").outputs["held"][-1].kv_transfer_params
    decode.add("held", prompt, seeds=HELD_SEEDS, kv_transfer_params=to_decode, **asked)
    generated = decode.finish(*names)
    for name in names:
        assert generated.token_ids(name) == expected.token_ids(name)
        assert WORDS.fullmatch(bytes(generated.token_ids(name)[:-1]).decode())
    assert generated.stats.transfers is not None
    assert generated.stats.transfers.num_blocks_received > 0


class FailingConnector(NixlConnector):
    """Its reads leave the pages full of NaN."""

    def __init__(self, name: str, buffer: Tensor, parts: PageParts) -> None:
        super().__init__(name, buffer, parts)
        self._pages: dict[int, list[int]] = {}

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        read = super().start_read(engine_id, pairs)
        self._pages[read] = [pair.ours for pair in pairs]
        return read

    def state(self, read: int) -> ReadState:
        if super().state(read) == "reading":
            return "reading"
        self._buffer[self._pages[read]] = 255
        return "failed"


@pytest.mark.parametrize("stage", [0, 1])
def test_what_one_stage_fails_to_read_all_stages_compute(
    reference: Callable[[str], Reference], start_ranked: RankedFactory, transfers: Transfers, stage: int
) -> None:
    """The other stage has its pages."""
    model, transfers.fails_requests = reference("LlamaForCausalLM"), False
    transfers.make_connector = lambda name, buffer, parts: (
        FailingConnector if parts.stage.index == stage else NixlConnector
    )(name, buffer, parts)
    prefill, decode = start_ranked(model.folder), start_ranked(model.folder)
    generated = split(model, prefill, decode)
    assert [generated.token_ids(name) for name in names_of(model)] == model.outputs
    assert generated.stats.transfers is not None
    assert generated.stats.transfers.num_failures == {"read": 4}, "of all prompts that fill a block"
    assert generated.stats.transfers.num_blocks_received == 0
    for engine in (prefill, decode):
        engine.step_until(lambda engine=engine: engine.num_blocks_used == 0)


def test_stages_that_are_cut_elsewhere_are_refused_by_name(
    reference: Callable[[str], Reference], start_ranked: RankedFactory, transfers: Transfers,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model, transfers.fails_requests = reference("LlamaForCausalLM"), False
    prefill, decode = start_ranked(model.folder), start_ranked(model.folder, layer_partition=(1, 2))
    generated = split(model, prefill, decode)
    assert [generated.token_ids(name) for name in names_of(model)] == model.outputs
    assert generated.stats.transfers is not None
    assert set(generated.stats.transfers.num_failures) == {"handshake"}
    assert "pipeline cut is [2, 1] there and [1, 2] here" in caplog.text


def test_both_legs_at_once_over_stages_with_aborts_leave_nothing_behind(
    reference: Callable[[str], Reference], start_ranked: RankedFactory, transfers: Transfers
) -> None:
    """Each round anew, so that nothing is cached; legs end at some turn of their engine, whatever goes on then."""
    model, transfers.fails_requests = reference("LlamaForCausalLM"), False
    prefill, decode = start_ranked(model.folder), start_ranked(model.folder)
    rng, num_undisturbed = random.Random(3), 0
    for number in range(8):
        expected = {f"{number}-{name}": output for name, output in zip(names_of(model), model.outputs, strict=True)}
        for name, prompt in zip(expected, model.prompts, strict=True):
            salt = {"cache_salt": str(number)}
            to_prefill = KvTransferParams(do_remote_decode=True, transfer_id=name)
            prefill.add(f"p-{name}", prompt, kv_transfer_params=to_prefill, max_tokens=1, **salt)
            decode.add(name, prompt, kv_transfer_params=transfers.from_first(name), **salt)
        prefill_ends, decode_ends = (
            {name: rng.randint(1, 12) for name in expected if rng.random() < 0.3} for _ in range(2)
        )
        num_undisturbed += len(expected.keys() - prefill_ends.keys() - decode_ends.keys())
        with ThreadPoolExecutor() as pool:
            leg = pool.submit(drive, prefill, {f"p-{name}": prefill_ends.get(name) for name in expected})
            drive(decode, {name: decode_ends.get(name) for name in expected})
            leg.result()
        for name in expected.keys() - decode_ends.keys():
            assert [token for one in decode.channel.outputs[name] for token in one.new_token_ids] == expected[name]
    for engine in (prefill, decode):
        engine.step_until(lambda engine=engine: engine.num_blocks_used == 0)
    assert decode.channel.stats is not None
    assert decode.channel.stats.transfers is not None
    assert decode.channel.stats.transfers.num_blocks_received >= num_undisturbed


def drive(engine: Engine, ends: dict[str, int | None]) -> None:
    """Until all have ended; those that name a turn are aborted at it."""
    for turn in range(1 + max(end or 0 for end in ends.values())):
        engine.abort(*(name for name, end in ends.items() if end == turn))
        engine.core.step()
    engine.finish(*(name for name, end in ends.items() if end is None))


def names_of(model: Reference) -> list[str]:
    return [f"request-{number}" for number in range(len(model.prompts))]


def split(model: Reference, prefill: Engine, decode: Engine) -> Generated:
    """What decoding gives after its prompts were computed elsewhere."""
    names = names_of(model)
    for name, prompt in zip(names, model.prompts, strict=True):
        prefill.add(name, prompt, kv_transfer_params=KvTransferParams(do_remote_decode=True), max_tokens=1)
    first = prefill.finish(*names)
    for name, prompt in zip(names, model.prompts, strict=True):
        to_decode = first.outputs[name][-1].kv_transfer_params
        decode.add(name, prompt, kv_transfer_params=to_decode, logprobs=1 if name in SCORED else None)
    return decode.finish(*names)


def check_split(model: Reference, prefill: Engine, decode: Engine) -> None:
    names, generated = names_of(model), split(model, prefill, decode)
    for index, name in enumerate(names):
        model.check(generated, name, index)
    assert generated.stats.transfers is not None
    assert generated.stats.transfers.num_blocks_received > 0
    cached = [generated.outputs[name][0].num_cached_tokens for name in names]
    assert cached == [0] * len(names), "what was pulled was not cached here"
