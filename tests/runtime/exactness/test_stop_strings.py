"""Stop strings with speculation: a text ends where it ends without drafts, and the core lets its sequence go.

The target and its drafts are the trained ones of `examples/models`: their drafts often hold.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.conftest import MAX_MODEL_LEN, NUM_NEW_TOKENS, Engine, Features, said_alone
from tests.runtime.exactness.speculators import METHODS, NUM_DRAFTS

from kvasir_runtime.config import SpeculativeConfig
from kvasir_runtime.engine.async_engine import AsyncEngine, GenerateRequest
from kvasir_runtime.engine.detokenizer import TextOptions
from kvasir_runtime.engine.generation import SequenceDelta, joined
from kvasir_runtime.engine.messages import AbortRequests, EngineReady, FromCore, ToCore
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.request_metrics import RequestMetrics, request_rows
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams

MODELS = Path(__file__).parents[3] / "examples" / "models"
TARGET = MODELS / "kvasir-python-7m"
DRAFTS = {
    "draft_model": MODELS / "kvasir-python-700k",
    "medusa": MODELS / "kvasir-python-7m-medusa",
    "eagle": MODELS / "kvasir-python-7m-eagle",
    "eagle3": MODELS / "kvasir-python-7m-eagle3",
}
CODE = """\
    def close(self):
        if self._file is not None:
            self._file.close()

    def __enter__(self):
"""
STOP_LENGTH, NUM_STOPS = 3, 7
READY = EngineReady(
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=8,
    vocab_size=4096,
    num_blocks=1,
    block_size=8,
    device="cpu",
    attention_backend="cpu",
    startup_seconds={},
)


@dataclass(frozen=True)
class Written:
    """What the plain engine goes on with."""

    tokenizer: Tokenizer
    prompt: list[int]
    text: str


@dataclass
class SteppedCore:
    """An engine core without a wire to AsyncEngine: it takes a step whenever news are waited for."""

    engine: Engine
    num_aborted: int = 0
    _news: list[FromCore] = field(default_factory=lambda: [READY])

    def send(self, message: ToCore) -> None:
        self.num_aborted += len(message.aborts) if isinstance(message, AbortRequests) else 0
        self.engine.channel.waiting.append(message)

    async def receive(self) -> list[FromCore]:
        while not self._news:
            await asyncio.sleep(0)
            if self.engine.channel.waiting or not self.engine.is_idle:
                self.engine.core.step()
                self._news, self.engine.channel.sent = [*self.engine.channel.sent], []
        news, self._news = self._news, []
        return news


@pytest.fixture(scope="module")
def written() -> Written:
    tokenizer = Tokenizer.load(TARGET)
    prompt = tokenizer.encode(CODE, add_special_tokens=False)
    return Written(tokenizer, prompt, tokenizer.decode(said_alone(TARGET, [prompt]).outputs[0]))


@pytest.mark.parametrize("method", METHODS)
def test_a_text_ends_at_its_stop_string_wherever_drafts_reach(
    method: str, written: Written, start_engine: Any, tmp_path: Path
) -> None:
    draft = DRAFTS.get(method)
    speculation = SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        model=None if draft is None else str(draft),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive=False,
    )
    engine = start_engine(TARGET, Features(one_step_ahead=True), speculative_config=speculation)
    core = SteppedCore(engine)
    places = range(5, len(written.text) - STOP_LENGTH, len(written.text) // NUM_STOPS)
    stops = [written.text[place : place + STOP_LENGTH] for place in places]
    ends = asyncio.run(asyncio.wait_for(texts_until(core, written, stops, tmp_path), 120))
    for stop, end in zip(stops, ends, strict=True):
        assert end.text == written.text[: written.text.index(stop)]
        assert (end.finish_reason, end.stop_reason) == ("stop", stop)
        assert written.tokenizer.decode(end.token_ids[:-1]).count(stop) == 0
    assert core.num_aborted == len(stops)
    stats = engine.channel.stats
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert stats.num_accepted_tokens > 0


async def texts_until(core: SteppedCore, written: Written, stops: list[str], folder: Path) -> list[SequenceDelta]:
    """What is written after the same prompt until each of the stop strings, all at once; then the core is idle."""
    metrics = RequestMetrics(request_rows(folder, 1).row(0))
    engine = AsyncEngine([core], written.tokenizer, metrics, api_index=0)  # type: ignore[list-item]
    listening = asyncio.create_task(engine.run())
    while engine.ready is None:  # noqa: ASYNC110 - a test looks; nothing else waits for it
        await asyncio.sleep(0)
    requests = [
        GenerateRequest(
            request_id="r",
            spec=RequestSpec(
                prompt_token_ids=written.prompt,
                sampling=SamplingParams(max_tokens=NUM_NEW_TOKENS, seed=0, temperature=0.0),
            ),
            text=TextOptions(stop=(stop,)),
        )
        for stop in stops
    ]
    deltas: list[list[SequenceDelta]] = [[] for _ in stops]
    with engine.generate(requests) as generation:
        async for arrived in generation:
            for delta in arrived:
                deltas[delta.index].append(delta)
    while core.engine.channel.waiting or not core.engine.is_idle:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    return [joined(each) for each in deltas]
