"""Prompts computed by one real engine and continued by another, their KV moved by NIXL: greedy output is Hugging
Face's, token for token."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.runtime.exactness.conftest import Engine, EngineFactory, Features, Reference, engine_over
from tests.runtime.exactness.rank_threads import start_ranks

from kvasir_runtime.config import SpeculativeConfig
from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.execution.worker import Worker
from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.ranks.rank_main import rank_transfers
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import Place
from kvasir_runtime.transfer.connector import Connector
from kvasir_runtime.transfer.handshake import identity
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.page_layout import PageParts, TensorPlace
from kvasir_runtime.transfer.params import KvTransferParams
from kvasir_runtime.transfer.rank_connectors import RankConnectors
from kvasir_runtime.transfer.side_channel import SideChannel


class Transfers:
    """Gives engines their part in exchanging KV, and ends it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._num_made = 0

    def __call__(self, worker: Worker, scheduler: Scheduler, wake: threading.Event) -> KvTransfers:
        return self.of_ranks([worker], scheduler, wake)

    def of_ranks(self, workers: list[Worker], scheduler: Scheduler, wake: threading.Event) -> KvTransfers:
        self._num_made += 1
        channel = SideChannel("127.0.0.1", 0)
        self._stack.callback(channel.close)
        engine_id, rank = f"engine-{self._num_made}", workers[0].description
        place = Place(engine_id=engine_id, host="127.0.0.1", port=channel.port, tensor_size=len(workers))
        agent = TransferAgent(
            self._connector(engine_id, workers),
            channel,
            identity("model", "", rank.layout, rank.kv_specs, len(workers)),
            place,
            page_bytes=rank.layout.page_bytes,
            lease_seconds=30,
            timeout_seconds=30,
            checksums=True,
            wake_core=wake.set,
        )
        agent.start()
        self._stack.callback(agent.close)
        return KvTransfers(scheduler, agent, place, page_bytes=rank.layout.page_bytes, fails_requests=True)

    def _connector(self, engine_id: str, workers: list[Worker]) -> Connector:
        """Over links, as the ranks' processes are reached, where there are several."""
        if len(workers) == 1:
            rank = workers[0].description
            parts = PageParts(rank.kv_specs, rank.layout.block_size, TensorPlace(0, 1))
            return NixlConnector(engine_id, workers[0].runner.kv_buffer, parts)
        folder = self._folder / engine_id
        folder.mkdir()
        links = CoreLinks(ipc_addresses(folder, len(workers)))
        self._stack.callback(links.close)
        for rank, (worker, address) in enumerate(zip(workers, links.bound.transfers, strict=True)):
            rank_transfers(worker, TensorPlace(rank, len(workers)), address, self._fail).start()
        return RankConnectors(links.transfers)

    @staticmethod
    def _fail(error: Exception) -> None:
        traceback.print_exception(error)


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    with ExitStack() as stack:
        yield Transfers(stack, tmp_path)


CACHED = Features(prefix_cache=True)
CHUNKED = Features(prefix_cache=True, chunked=True)
AHEAD = Features(prefix_cache=True, chunked=True, three_steps_ahead=True)
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)


@pytest.mark.parametrize(
    ("architecture", "features", "speculative"),
    [
        ("LlamaForCausalLM", CHUNKED, None),
        ("Gemma3ForCausalLM", AHEAD, None),  # windows: two KV groups
        ("MistralForCausalLM", CACHED, DRAFTS),
    ],
)
def test_output_is_that_of_one_engine(
    reference: Callable[[str], Reference], start_engine: EngineFactory, transfers: Transfers,
    architecture: str, features: Features, speculative: SpeculativeConfig | None,
) -> None:  # fmt: skip
    model = reference(architecture)
    prefill = start_engine(model.folder, features, make_transfers=transfers)
    decode = start_engine(model.folder, features, make_transfers=transfers, speculative_config=speculative)
    check_split(model, prefill, decode)


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
    reference: Callable[[str], Reference], start_engine: EngineFactory, transfers: Transfers, tmp_path: Path,
    architecture: str, num_prefill_ranks: int, num_decode_ranks: int,
) -> None:  # fmt: skip
    model = reference(architecture)
    with ExitStack() as stack:

        def start(size: int) -> Engine:
            if size == 1:
                return start_engine(model.folder, CHUNKED, make_transfers=transfers)
            folder = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            ranks = start_ranks(model.folder, folder, size)
            stack.callback(ranks.close)
            own = partial(transfers.of_ranks, ranks.workers)
            return engine_over(ranks, ranks.workers[0].description, CHUNKED, None, make_transfers=own)

        check_split(model, start(num_prefill_ranks), start(num_decode_ranks))


def check_split(model: Reference, prefill: Engine, decode: Engine) -> None:
    names = [f"request-{number}" for number in range(len(model.prompts))]
    for name, prompt in zip(names, model.prompts, strict=True):
        prefill.add(name, prompt, kv_transfer_params=KvTransferParams(do_remote_decode=True), max_tokens=1)
    first = prefill.finish(*names)
    for name, prompt in zip(names, model.prompts, strict=True):
        decode.add(name, prompt, kv_transfer_params=first.outputs[name][-1].kv_transfer_params)
    generated = decode.finish(*names)
    assert [generated.token_ids(name) for name in names] == model.outputs
    assert generated.stats.transfers is not None
    assert generated.stats.transfers.num_blocks_received > 0
    cached = [generated.outputs[name][0].num_cached_tokens for name in names]
    assert cached == [(len(prompt) - 1) // 8 * 8 for prompt in model.prompts]
