"""One pod's life: ready, restarted when it ends or hangs, given up when it never starts, stopped with its children."""

import asyncio
import io
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_operator.errors import PodNeverReadyError
from kvasir_operator.local.console import Console
from kvasir_operator.local.network import LoopbackNetwork
from kvasir_operator.local.pod_process import answers_ok
from kvasir_operator.local.pods import Listener, LocalPod, LocalProbe
from kvasir_operator.local.supervisor import ReplicaSupervisor, RestartPolicy
from kvasir_operator.local.watchdog import Watchdog

QUICK = RestartPolicy(first_wait_seconds=0.05, readiness_poll_seconds=0.02, short_grace_seconds=0.5)
Story = Callable[[ReplicaSupervisor, "asyncio.Task[None]"], Awaitable[None]]
BOUND_SECONDS = 30.0


class Life:
    """Runs one fake pod under a supervisor and lets a test act on it."""

    def __init__(self, programs: Path, network: LoopbackNetwork) -> None:
        self.listener = Listener(network.next_address(), 8000)
        self.program = str(programs / "kvasir-runtime")
        self.output = io.StringIO()

    def pod(self, grace_seconds: float, env: dict[str, str]) -> LocalPod:
        url = self.listener.url
        return LocalPod(
            name="engine-0",
            role="serve",
            command=(self.program, "--host", self.listener.address, "--port", str(self.listener.port)),
            env={**os.environ, **env},
            listeners=(self.listener,),
            readiness=LocalProbe(f"{url}/ready", 1, 1),
            liveness=LocalProbe(f"{url}/health", 0.02, 2),
            grace_seconds=grace_seconds,
            replica="engine-0",
        )

    def run(self, story: Story, grace_seconds: float = 10.0, policy: RestartPolicy = QUICK, **env: str) -> str:
        """Everything that was printed until the story ended and the pod was stopped."""

        async def main() -> None:
            watchdog = await Watchdog.start()
            console = Console(["engine-0"], self.output)
            supervisor = ReplicaSupervisor([self.pod(grace_seconds, env)], console, watchdog, policy)
            async with asyncio.timeout(BOUND_SECONDS):
                task = asyncio.create_task(supervisor.run())
                try:
                    await story(supervisor, task)
                finally:
                    supervisor.stop()
                    await asyncio.gather(task, return_exceptions=True)
                    await watchdog.close()

        asyncio.run(main())
        return self.output.getvalue()

    async def printed(self, text: str, times: int = 1) -> None:
        while self.output.getvalue().count(text) < times:  # noqa: ASYNC110  (a StringIO has no event to wait for)
            await asyncio.sleep(0.01)


@pytest.fixture
def life(programs: Path, network: LoopbackNetwork) -> Life:
    return Life(programs, network)


def is_running(pid: int) -> bool:
    """False for a zombie too: nobody may have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_says_when_it_is_ready_and_relays_its_output(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await supervisor.is_ready.wait()

    text = life.run(story)
    assert f"[local]    engine-0 starting at {life.listener.url}" in text
    assert "engine-0 ready after" in text
    assert "[engine-0] fake program starts" in text
    assert text.endswith("[engine-0] fake program ends\n")


def test_restarts_a_pod_that_ends_and_says_so(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await supervisor.is_ready.wait()
        await answers_ok(f"{life.listener.url}/crash")
        await life.printed("ready after", times=2)

    assert "engine-0 ended with status 7 after" in life.run(story)


def test_restarts_a_pod_that_answers_but_is_not_healthy(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await supervisor.is_ready.wait()
        await answers_ok(f"{life.listener.url}/hang")
        await life.printed("ready after", times=2)

    assert f"failed {life.listener.url}/health 2 times in a row, ending it" in life.run(story)


def test_failures_that_are_not_in_a_row_end_nothing(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await life.printed("engine-0 ended with")

    before, _, _ = life.run(story, FAKE_HEALTH="503,200,503,200,503,503").partition("engine-0 ended with")
    assert before.count("fake health") == 6


@pytest.mark.parametrize(
    ("steady_seconds", "waits"), [(60.0, ["0.05", "0.1", "0.15", "0.15"]), (0.0, ["0.05", "0.05", "0.05", "0.05"])]
)
def test_waits_double_up_to_the_longest_and_start_over_after_a_steady_life(
    life: Life, steady_seconds: float, waits: list[str]
) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await asyncio.wait({task})

    policy = RestartPolicy(0.05, 0.15, steady_seconds, max_starts_until_ready=5)
    assert re.findall(r"starting it again in (\S+) s", life.run(story, policy=policy, FAKE_EXIT="3")) == waits


def test_gives_up_on_a_pod_that_never_becomes_ready(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        with pytest.raises(PodNeverReadyError, match="engine-0 ended 3 times before it was ready, last with status 3"):
            await task

    text = life.run(story, FAKE_EXIT="3")
    assert text.count("[engine-0] fake program refuses its flags") == 3


def test_kills_a_pod_that_outlives_its_grace_with_all_its_children(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await supervisor.is_ready.wait()

    text = life.run(story, grace_seconds=0.2, FAKE_STUBBORN="1")
    child = int(text.partition("fake child ")[2].split()[0])
    assert "still runs 0.2 s after SIGTERM, killing it" in text
    assert not is_running(child)


def test_a_pod_that_is_ended_has_its_grace_healthy_or_not(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await supervisor.is_ready.wait()
        supervisor.stop()
        await answers_ok(f"{life.listener.url}/hang")
        await task

    text = life.run(story, grace_seconds=1.0, FAKE_STUBBORN="1")
    assert "still runs 1 s after SIGTERM, killing it" in text
    assert "in a row" not in text


def test_hurry_ends_the_grace_at_once(life: Life) -> None:
    async def story(supervisor: ReplicaSupervisor, task: "asyncio.Task[None]") -> None:
        await supervisor.is_ready.wait()
        supervisor.stop()
        supervisor.hurry()
        await task

    assert "still runs" not in life.run(story, grace_seconds=BOUND_SECONDS, FAKE_STUBBORN="1")


def test_stopping_does_not_wait_for_a_restart_that_is_due(life: Life) -> None:
    slow = RestartPolicy(first_wait_seconds=600, readiness_poll_seconds=0.02)

    async def main() -> None:
        watchdog = await Watchdog.start()
        console = Console(["engine-0"], life.output)
        supervisor = ReplicaSupervisor([life.pod(1.0, {"FAKE_EXIT": "1"})], console, watchdog, slow)
        async with asyncio.timeout(BOUND_SECONDS):
            task = asyncio.create_task(supervisor.run())
            await life.printed("starting it again in 600 s")
            supervisor.stop()
            await task
            await watchdog.close()

    asyncio.run(main())


def test_the_first_pod_of_a_group_finishes_before_the_others_are_told_to_go(
    life: Life, programs: Path, network: LoopbackNetwork
) -> None:
    """It needs them for its requests."""
    other = Life(programs, network)
    other.output = life.output
    first = replace(life.pod(10.0, {}), name="engine-0-0")
    second = replace(other.pod(10.0, {}), name="engine-0-1", rank=1)

    async def main() -> None:
        watchdog = await Watchdog.start()
        console = Console([first.name, second.name], life.output)
        supervisor = ReplicaSupervisor([first, second], console, watchdog, QUICK)
        async with asyncio.timeout(BOUND_SECONDS):
            task = asyncio.create_task(supervisor.run())
            await life.printed("ready after", times=2)
            assert supervisor.is_ready.is_set()
            supervisor.stop()
            await task
            await watchdog.close()

    asyncio.run(main())
    assert re.search(r"\[engine-0-0\] fake program ends(.|\n)*\[engine-0-1\] fake program ends", life.output.getvalue())
    assert "starting all pods" not in life.output.getvalue()
