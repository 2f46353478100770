"""One life of a local pod: its process from start to end, with its output, its readiness and its liveness."""

import asyncio
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import aiohttp

from kvasir_operator.local.console import Console
from kvasir_operator.local.pods import LocalPod, LocalProbe
from kvasir_operator.local.watchdog import Watchdog, end_group

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class PodProcess:
    """`run` is to be awaited by the caller until it returns; once `hurrying` is set, nothing is waited for any more."""

    def __init__(
        self,
        pod: LocalPod,
        console: Console,
        watchdog: Watchdog,
        hurrying: asyncio.Event,
        readiness_poll_seconds: float,
        short_grace_seconds: float,
    ) -> None:
        """`short_grace_seconds`: for a pod that hangs, and for output still in the pipe after the end."""
        self.pod = pod
        self._console = console
        self._watchdog = watchdog
        self._hurrying = hurrying
        self._readiness_poll_seconds = readiness_poll_seconds
        self._short_grace_seconds = short_grace_seconds
        self._ending = asyncio.Event()
        self._grace_seconds = pod.grace_seconds

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Returns its exit status (negative: the signal that ended it), or that of what runs before it and failed.

        `on_ready` is called at its readiness.
        """
        for init in self.pod.inits:
            status = await self._run(init.command, init.env, None)
            if status != 0 or self._ending.is_set():
                return status
        where = ", ".join(listener.url for listener in self.pod.listeners)
        self._say(f"starting at {where}")
        return await self._run(self.pod.command, self.pod.env, on_ready)

    def end(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL after the grace; of a pod that is being ended already nothing changes."""
        if not self._ending.is_set():
            self._grace_seconds = grace_seconds
            self._ending.set()

    async def _run(self, command: Sequence[str], env: Mapping[str, str], on_ready: Callable[[], None] | None) -> int:
        """One process to its end; `on_ready` None: it is not probed."""
        process = await self._start(command, env)
        self._watchdog.guard(process.pid)
        assert process.stdout is not None
        relay = asyncio.create_task(self._console.relay(self.pod.name, process.stdout))
        owned = [asyncio.create_task(self._end_when_asked(process))]
        if on_ready is not None:
            owned.append(asyncio.create_task(self._probe(process, on_ready)))
        try:
            return await process.wait()
        finally:
            for task in owned:
                task.cancel()
            # Children that outlived the pod's own process would keep its ports and its output open.
            end_group(process.pid, signal.SIGKILL)
            await asyncio.wait({relay}, timeout=self._short_grace_seconds)
            relay.cancel()
            results = await asyncio.gather(relay, *owned, return_exceptions=True)
            self._watchdog.release(process.pid)
            for error in (result for result in results if isinstance(result, Exception)):
                raise error

    async def _start(self, command: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal reaches `local` alone, which stops its pods in order
        )
        if self.pod.memory_bytes is not None:
            # Nothing enforces this limit; an engine sizes its KV cache by it as by that of a container.
            hardest = resource.getrlimit(resource.RLIMIT_RSS)[1]
            with suppress(ProcessLookupError, ValueError):  # it has ended, or may have less already
                resource.prlimit(process.pid, resource.RLIMIT_RSS, (self.pod.memory_bytes, hardest))
        return process

    async def _end_when_asked(self, process: asyncio.subprocess.Process) -> None:
        await self._ending.wait()
        await self._end(process, self._grace_seconds)

    async def _end(self, process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        """SIGTERM goes to the pod's own process, as in a container; SIGKILL to all of its group."""
        with suppress(ProcessLookupError):  # it ended by itself just now
            process.terminate()
        if not await happens_within(self._hurrying, grace_seconds):
            self._say(f"still runs {grace_seconds:g} s after SIGTERM, killing it")
        end_group(process.pid, signal.SIGKILL)

    async def _probe(self, process: asyncio.subprocess.Process, on_ready: Callable[[], None]) -> None:
        started = time.monotonic()
        await _until_ok(self.pod.readiness.url, self._readiness_poll_seconds)
        self._say(f"ready after {time.monotonic() - started:.1f} s")
        on_ready()
        await _until_unhealthy(self.pod.liveness)
        if self._ending.is_set():
            return  # it has its grace, healthy or not, as a kubelet gives it
        self._say(f"failed {self.pod.liveness.url} {self.pod.liveness.failure_threshold} times in a row, ending it")
        await self._end(process, self._short_grace_seconds)

    def _say(self, text: str) -> None:
        self._console.say(f"{self.pod.name} {text}")


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def _until_ok(url: str, poll_seconds: float) -> None:
    while True:
        if await answers_ok(url):
            return
        await asyncio.sleep(poll_seconds)


async def _until_unhealthy(probe: LocalProbe) -> None:
    num_failures = 0
    while num_failures < probe.failure_threshold:
        await asyncio.sleep(probe.period_seconds)
        num_failures = 0 if await answers_ok(probe.url) else num_failures + 1


async def answers_ok(url: str) -> bool:
    """Whether GET `url` is answered with a 2xx status within 5 s: what a pod's probes ask."""
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            return 200 <= answer.status < 300
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
