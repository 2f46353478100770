"""Prompts computed by one real engine and continued by another, their KV moved by NIXL: greedy output is Hugging
Face's, token for token."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.runtime.exactness.conftest import EngineFactory, Features, Reference

from kvasir_runtime.config import SpeculativeConfig
from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.execution.worker import Worker
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import Place
from kvasir_runtime.transfer.handshake import identity
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.params import KvTransferParams
from kvasir_runtime.transfer.side_channel import SideChannel


class Transfers:
    """Gives engines their part in exchanging KV, and ends it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._num_made = 0

    def __call__(self, worker: Worker, scheduler: Scheduler, wake: threading.Event) -> KvTransfers:
        self._num_made += 1
        channel = SideChannel("127.0.0.1", 0)
        self._stack.callback(channel.close)
        engine_id = f"engine-{self._num_made}"
        place = Place(engine_id=engine_id, host="127.0.0.1", port=channel.port)
        agent = TransferAgent(
            NixlConnector(engine_id, worker.runner.kv_buffer),
            channel,
            identity("model", "", worker.description.layout, worker.description.kv_specs, tensor_size=1),
            place,
            page_bytes=worker.description.layout.page_bytes,
            lease_seconds=30,
            timeout_seconds=30,
            checksums=True,
            wake_core=wake.set,
        )
        agent.start()
        self._stack.callback(agent.close)
        return KvTransfers(
            scheduler, agent, place, page_bytes=worker.description.layout.page_bytes, fails_requests=True
        )


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    with ExitStack() as stack:
        yield Transfers(stack)


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
