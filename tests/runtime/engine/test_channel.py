"""The wire between API processes and the core: order, start order, and no work while idle."""

import asyncio
import resource
from pathlib import Path

import pytest

from kvasir_runtime.engine.channel import CoreChannel, EngineChannel, api_address, tell_api_processes, tell_cores
from kvasir_runtime.engine.messages import Abort, AbortRequests, ApiGone, EngineFailed, FromCore
from kvasir_runtime.errors import ConfigurationError, EngineDeadError
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.sampling_params import SamplingParams


def make_request(request_id: str) -> AddRequest:
    sampling = SamplingParams(max_tokens=3, seed=2**64 - 1, logit_bias={5: -1.5}, stop_token_ids=(1, 2))
    return AddRequest(
        request_id=request_id,
        api_index=0,
        spec=RequestSpec(prompt_token_ids=[1, 2, 3], sampling=sampling, cache_salt="salt"),
        sequences=[SequenceStart(index=0, seed=2**64 - 1)],
        arrival_time=1.5,
    )


def test_core_receives_what_an_api_process_sent_before_the_core_was_there(tmp_path: Path) -> None:
    api = EngineChannel(tmp_path, 0)
    sent = [make_request("a"), AbortRequests(aborts=[Abort("a")]), make_request("b")]
    for message in sent:
        api.send(message)
    core = CoreChannel(tmp_path, api_server_count=1)
    received = core.receive(5.0)
    while len(received) < len(sent):
        received += core.receive(5.0)
    core.close()
    api.close()
    assert received == sent


def test_each_api_process_gets_its_own_messages_and_every_broadcast(tmp_path: Path) -> None:
    core = CoreChannel(tmp_path, api_server_count=2)

    async def exchange() -> list[list[str]]:
        apis = [EngineChannel(tmp_path, index) for index in range(2)]
        core.send(0, EngineFailed(error="only for 0"))
        core.broadcast(EngineFailed(error="for all"))
        seen: list[list[str]] = []
        for api, count in zip(apis, (2, 1), strict=True):
            messages = await asyncio.wait_for(api.receive(), 5)
            while len(messages) < count:
                messages += await asyncio.wait_for(api.receive(), 5)
            seen.append([message.error for message in messages if isinstance(message, EngineFailed)])
            api.close()
        return seen

    assert asyncio.run(exchange()) == [["only for 0", "for all"], ["for all"]]
    core.close()


def test_nothing_more_is_kept_for_an_api_process_that_has_died(tmp_path: Path) -> None:
    core = CoreChannel(tmp_path, api_server_count=2)
    core.send(1, EngineFailed(error="before"))
    core.forget(1)
    core.send(1, EngineFailed(error="after"))
    core.broadcast(EngineFailed(error="for all"))

    async def received(api: EngineChannel) -> list[str]:
        messages = await asyncio.wait_for(api.receive(), 5)
        return [message.error for message in messages if isinstance(message, EngineFailed)]

    other, successor = EngineChannel(tmp_path, 0), EngineChannel(tmp_path, 1)
    assert asyncio.run(received(other)) == ["for all"]
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(successor.receive(), 0.1))
    for end in (core, other, successor):
        end.close()


def test_a_core_hears_that_an_api_process_has_died(tmp_path: Path) -> None:
    core = CoreChannel(tmp_path, api_server_count=2)
    tell_cores(tmp_path, 1, ApiGone(1))
    assert core.receive(5.0) == [ApiGone(1)]
    core.close()


def test_waiting_for_messages_sleeps_in_the_kernel_once(tmp_path: Path) -> None:
    """Neither spinning, which takes processor time, nor polling, which wakes again and again."""
    core = CoreChannel(tmp_path, api_server_count=1)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    assert core.receive(0.5) == []
    after = resource.getrusage(resource.RUSAGE_THREAD)
    core.close()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
    assert after.ru_nvcsw - before.ru_nvcsw < 20


def test_a_folder_too_deep_for_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        api_address(tmp_path / ("x" * 120), 0, 0)


def test_a_core_that_goes_away_is_noticed_after_its_last_words(tmp_path: Path) -> None:
    async def listen() -> str:
        api = EngineChannel(tmp_path, 0)
        core = CoreChannel(tmp_path, api_server_count=1)
        api.send(AbortRequests(aborts=[Abort("a")]))
        assert core.receive(5.0)
        core.broadcast(EngineFailed(error="no memory"))
        await asyncio.to_thread(core.close)
        [message] = await asyncio.wait_for(api.receive(), 5)
        assert isinstance(message, EngineFailed)
        with pytest.raises(EngineDeadError, match="ended without a word"):
            await asyncio.wait_for(api.receive(), 5)
        api.close()
        return message.error

    assert asyncio.run(listen()) == "no memory"


def test_what_is_told_of_a_core_after_its_connection_broke_is_heard(tmp_path: Path) -> None:
    failed = EngineFailed(error="its process ended with status -9")

    async def listen() -> list[FromCore]:
        api = EngineChannel(tmp_path, 0)
        core = CoreChannel(tmp_path, api_server_count=1)
        api.send(AbortRequests(aborts=[Abort("a")]))
        assert core.receive(5.0)
        await asyncio.to_thread(core.close)
        asyncio.get_running_loop().call_later(0.3, tell_api_processes, tmp_path, 1, 0, failed)
        heard = await asyncio.wait_for(api.receive(), 5)
        api.close()
        return heard

    assert asyncio.run(listen()) == [failed]
