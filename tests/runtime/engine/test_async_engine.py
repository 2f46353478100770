"""What an API process knows of its requests, with the core played by the test."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kvasir_runtime import request_metrics as counted
from kvasir_runtime.engine.async_engine import AsyncEngine, GenerateRequest, child_seed
from kvasir_runtime.engine.channel import CoreChannel, EngineChannel
from kvasir_runtime.engine.detokenizer import TextOptions
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.engine.messages import Abort, AbortRequests, EngineReady, StepOutputs, ToCore
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import EngineDeadError, RequestFailedError, RequestTooLargeError, ServerUnavailableError
from kvasir_runtime.request_metrics import RequestMetrics, request_rows
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec
from kvasir_runtime.requests.outputs import PlainTokens, SequenceOutput, TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.requests.stats import SchedulerStats

READY = EngineReady(
    max_model_len=64,
    max_num_seqs=4,
    vocab_size=256,
    num_blocks=4,
    block_size=16,
    device="cpu",
    attention_backend="cpu",
    startup_seconds={},
)


def letters() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


TOKENIZER = letters()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def request(n: int = 1, stop: tuple[str, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        spec=RequestSpec(prompt_token_ids=ids("prompt"), sampling=SamplingParams(max_tokens=8, seed=1)),
        text=TextOptions(stop=stop),
        n=n,
    )


def stats(num_steps: int) -> SchedulerStats:
    return SchedulerStats(
        num_running=1,
        num_waiting=0,
        num_blocks_used=1,
        num_blocks=4,
        num_steps=num_steps,
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        last_step_time=0.0,
    )


class Core:
    """The other end of the wire."""

    def __init__(self, channel: CoreChannel) -> None:
        self._channel = channel
        self._num_steps = 0

    async def receive(self, count: int) -> list[ToCore]:
        messages: list[ToCore] = []
        while len(messages) < count:
            messages += await asyncio.to_thread(self._channel.receive, 5.0)
        return messages

    def step(self, *outputs: SequenceOutput, plain: PlainTokens | None = None) -> None:
        self._num_steps += 1
        self._channel.send(0, StepOutputs(outputs=list(outputs), stats=stats(self._num_steps), plain=plain))

    def tell(self, statistics: SchedulerStats) -> None:
        self._channel.broadcast(StepOutputs(outputs=[], stats=statistics))

    def ready(self) -> None:
        self._channel.broadcast(READY)


@asynccontextmanager
async def engine_and_core(
    folder: Path, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[AsyncEngine, Core]]:
    core_channel, channel = CoreChannel(folder, 1), EngineChannel(folder, 0)
    metrics = RequestMetrics(request_rows(folder, 1).row(0))
    engine = AsyncEngine([channel], TOKENIZER, metrics, api_index=0, clock=clock)
    task = asyncio.create_task(engine.run())
    core = Core(core_channel)
    core.ready()
    while engine.ready is None:  # noqa: ASYNC110 - a test looks; nothing else waits for it
        await asyncio.sleep(0)
    try:
        yield engine, core
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        channel.close()
        core_channel.close()


async def first_turn(generation) -> list[SequenceDelta]:
    return await asyncio.wait_for(anext(generation), 5)


def test_outputs_that_pile_up_come_as_one_delta(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request()]) as generation:
                [added] = await core.receive(1)
                assert isinstance(added, AddRequest)
                for letter in "ab":
                    core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids(letter)))
                core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids("c"), finish_reason="length"))
                while engine.stats is None or engine.stats.num_steps < 3:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
                [delta] = await first_turn(generation)
                assert (delta.text, delta.finish_reason) == ("abc", "length")
                with pytest.raises(StopAsyncIteration):
                    await first_turn(generation)

    asyncio.run(play())


def test_leaving_early_aborts_what_has_not_finished(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2)]) as generation:
                [added] = await core.receive(1)
                core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids("a"), finish_reason="stop"))
                await first_turn(generation)
            assert await core.receive(1) == [AbortRequests(aborts=[Abort(added.request_id)])]
            assert not engine.is_stalled(-1.0)

    asyncio.run(play())


def test_outputs_behind_a_stop_string_are_dropped(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(stop=("b",))]) as generation:
                [added] = await core.receive(1)
                core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids("abc")))
                [delta] = await first_turn(generation)
                assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "b")
                assert delta.token_ids == ids("ab")
                core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids("d"), finish_reason="length"))
                with pytest.raises(StopAsyncIteration):
                    await first_turn(generation)
            assert await core.receive(1) == [AbortRequests(aborts=[Abort(added.request_id, 0)])]

    asyncio.run(play())


def test_sequences_of_a_request_go_to_the_core_together_with_seeds_of_their_own(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2), request(n=1)]):
                first, second = await core.receive(2)
            assert [(start.index, start.seed) for start in first.sequences] == [(0, 1), (1, child_seed(1, 1))]
            assert [(start.index, start.seed) for start in second.sequences] == [(0, 1)]
            assert first.request_id != second.request_id

    asyncio.run(play())


def test_what_another_engine_has_shown_is_told_as_text(tmp_path: Path) -> None:
    """As much as is out: the beginning of a stop string is held back here as it was there."""
    begun = {1: SequenceDelta(index=1, token_ids=ids("abcd"))}

    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2, stop=("cde",))], begun):
                [added] = await core.receive(1)
            assert [start.output_token_ids for start in added.sequences] == [[], ids("abcd")]

    asyncio.run(play())
    assert begun[1].text == "ab"


def test_tokens_in_columns_reach_their_sequences(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2), request()]) as generation:
                first, second = await core.receive(2)
                request_ids = [second.request_id, first.request_id, first.request_id]
                core.step(plain=PlainTokens(request_ids, [0, 1, 0], [2, 1, 0], ids("abc")))
                deltas = {delta.index: delta.text for delta in await first_turn(generation)}
            assert {index: text for index, text in deltas.items() if text} == {2: "ab", 1: "c"}

    asyncio.run(play())


def test_a_stop_string_ends_its_sequence_in_the_core_although_nobody_reads(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2, stop=("b",))]) as generation:
                [added] = await core.receive(1)
                core.step(SequenceOutput(request_id=added.request_id, index=1, new_token_ids=ids("ab")))
                assert await core.receive(1) == [AbortRequests(aborts=[Abort(added.request_id, 1)])]
                core.step(SequenceOutput(request_id=added.request_id, index=0, new_token_ids=ids("x")))
                while engine.stats is None or engine.stats.num_steps < 2:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
                deltas = await first_turn(generation)
            assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
                (1, "a", "stop"),
                (0, "x", None),
            ]

    asyncio.run(play())


def test_log_probabilities_of_the_prompt_are_told_with_every_sequence(tmp_path: Path) -> None:
    positions = [None, TokenLogprobs([1], [-0.5], 1)]

    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2)]) as generation:
                [added] = await core.receive(1)
                one = SequenceOutput(request_id=added.request_id, new_token_ids=ids("a"), prompt_logprobs=positions)
                core.step(one, SequenceOutput(request_id=added.request_id, index=1, new_token_ids=ids("b")))
                assert [delta.prompt_logprobs for delta in await first_turn(generation)] == [positions, positions]

    asyncio.run(play())


def test_what_came_for_other_sequences_is_told_before_the_error_of_one(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request(n=2)]) as generation:
                [added] = await core.receive(1)
                failed = SequenceOutput(
                    request_id=added.request_id, new_token_ids=[], finish_reason="error", error="no room"
                )
                core.step(SequenceOutput(request_id=added.request_id, index=1, new_token_ids=ids("b")), failed)
                assert [(delta.index, delta.text) for delta in await first_turn(generation)] == [(1, "b")]
                with pytest.raises(RequestFailedError, match="no room"):
                    await first_turn(generation)
            assert await core.receive(1) == [AbortRequests(aborts=[Abort(added.request_id)])]

    asyncio.run(play())


def test_a_defect_in_handing_out_fails_everything_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request()]) as generation, engine.generate([request()]) as other:
                await core.receive(2)
                core.step(plain=PlainTokens(["one column is longer"], [], [], []))
                for each in (generation, other):
                    with pytest.raises(EngineDeadError, match="has a defect"):
                        await first_turn(each)
            assert engine.dead is not None

    asyncio.run(play())
    assert "zip()" in caplog.text


def test_statistics_of_an_idle_core_are_taken_over(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            core.step()
            idle = msgspec.structs.replace(stats(1), num_running=0)
            core.tell(idle)
            while engine.stats != idle:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(play(), 5))


@pytest.mark.parametrize(("is_too_large", "error"), [(False, RequestFailedError), (True, RequestTooLargeError)])
def test_request_that_the_core_gives_up_raises_its_words(
    tmp_path: Path, is_too_large: bool, error: type[Exception]
) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            with engine.generate([request()]) as generation:
                [added] = await core.receive(1)
                failed = SequenceOutput(
                    request_id=added.request_id,
                    new_token_ids=[],
                    finish_reason="error",
                    error="no room",
                    is_too_large=is_too_large,
                )
                core.step(failed)
                with pytest.raises(error, match="no room"):
                    await first_turn(generation)

    asyncio.run(play())


def test_only_pending_work_without_steps_is_a_stall(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            assert not engine.is_stalled(-1.0)  # idle: no limit is short enough
            with engine.generate([request()]) as generation:
                assert engine.is_stalled(-1.0)
                assert not engine.is_stalled(60.0)
                [added] = await core.receive(1)
                core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids("a"), finish_reason="stop"))
                await first_turn(generation)
                assert not engine.is_stalled(-1.0)

    asyncio.run(play())


def test_a_request_that_the_core_has_not_taken_in_is_work_beside_those_that_it_holds_for_other_engines(
    tmp_path: Path,
) -> None:
    held, now = msgspec.structs.replace(stats(1), num_running=0, num_held=1), 1000.0

    async def play() -> None:
        nonlocal now
        async with engine_and_core(tmp_path, lambda: now) as (engine, core):
            with engine.generate([request()]):
                core.tell(held)
                while engine.stats != held:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
                assert not engine.is_stalled(-1.0)
                now += 10.0
                with engine.generate([request()]):
                    assert not engine.is_stalled(0.0), "it has come just now"
                    assert engine.is_stalled(-1.0)
                assert not engine.is_stalled(-1.0)

    asyncio.run(asyncio.wait_for(play(), 5))


def test_nothing_is_generated_before_the_core_is_ready(tmp_path: Path) -> None:
    async def play() -> None:
        channel = EngineChannel(tmp_path, 0)
        engine = AsyncEngine([channel], TOKENIZER, RequestMetrics(request_rows(tmp_path, 1).row(0)), api_index=0)
        with pytest.raises(ServerUnavailableError, match="still loading"):
            engine.generate([request()])
        channel.close()

    asyncio.run(play())


def test_seeds_of_children_differ_and_are_the_same_each_time() -> None:
    seeds = [child_seed(2**64 - 1, index) for index in range(100)]
    assert seeds == [child_seed(2**64 - 1, index) for index in range(100)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_an_http_request_is_named_by_the_first_of_its_requests_that_is_left(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_core(tmp_path) as (engine, core):
            done = {0: SequenceDelta(index=0, token_ids=ids("a"), finish_reason="stop")}
            with engine.generate([request(), request(), request()], done, "router-7"):
                added = await core.receive(2)
            assert [message.http_request_id for message in added] == ["router-7", None]

    asyncio.run(play())


def test_times_and_tokens_of_a_request_are_measured_by_one_clock(tmp_path: Path) -> None:
    now = [100.0]

    async def play() -> None:
        async with engine_and_core(tmp_path, lambda: now[0]) as (engine, core):
            with engine.generate([request()]) as generation:
                [added] = await core.receive(1)
                assert isinstance(added, AddRequest)
                now[0] = 104.0
                core.step(
                    SequenceOutput(
                        request_id=added.request_id, new_token_ids=ids("a"), admitted_at=103.0, num_cached_tokens=2
                    )
                )
                await first_turn(generation)
                now[0] = 112.0
                core.step(SequenceOutput(request_id=added.request_id, new_token_ids=ids("bc"), finish_reason="length"))
                await first_turn(generation)

    asyncio.run(play())
    rows = request_rows(tmp_path, 1)
    expected = {
        counted.QUEUE: 3, counted.PREFILL: 1, counted.TTFT: 4, counted.DECODE: 8, counted.TPOT: 4, counted.E2E: 12,
        counted.PROMPT: 6, counted.COMPUTED: 4, counted.GENERATED: 3, counted.MOST_GENERATED: 3,
    }  # fmt: skip
    assert {histogram: rows.total(histogram.sum_slot) for histogram in expected} == expected
