"""Keeps one local pod running: starts it, waits until it is ready, restarts it when it ends or hangs, and stops it.

What the kubelet does for a pod, with its back-off shortened to what a person at a terminal waits for.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvasir_operator.errors import PodNeverReadyError
from kvasir_operator.local.console import Console
from kvasir_operator.local.pods import LocalPod, LocalProbe
from kvasir_operator.local.probe import answers_ok
from kvasir_operator.local.watchdog import Watchdog, end_group


@dataclass(frozen=True)
class RestartPolicy:
    """Waits double from first to longest, and start over after a process that lived for `steady_seconds`."""

    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 30.0
    steady_seconds: float = 60.0
    # A pod that ends so often before it is ready once will not become so by itself.
    max_starts_until_ready: int = 3
    # Faster than a probe's period: somebody watches.
    readiness_poll_seconds: float = 0.2
    # For a pod that hangs or is told to hurry, and for output still in the pipe after the end.
    short_grace_seconds: float = 5.0


class PodSupervisor:
    """Owns the process of one pod. `run` is to be awaited by the caller until it returns after `stop`."""

    def __init__(self, pod: LocalPod, console: Console, watchdog: Watchdog, policy: RestartPolicy) -> None:
        self.pod = pod
        self.is_ready = asyncio.Event()  # set at the first readiness, never cleared
        self._console = console
        self._watchdog = watchdog
        self._policy = policy
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()

    async def run(self) -> None:
        """Until stopped. Raises PodNeverReadyError when the pod keeps ending before its first readiness."""
        num_starts, wait_seconds = 0, self._policy.first_wait_seconds
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_once()
            lived = time.monotonic() - started
            if self._stopping.is_set():
                return
            num_starts += 1
            self._give_up_if_hopeless(num_starts, status)
            if lived >= self._policy.steady_seconds:
                wait_seconds = self._policy.first_wait_seconds
            self._say(
                f"ended with {describe_status(status)} after {lived:.1f} s, starting it again in {wait_seconds:g} s"
            )
            await _happens_within(self._stopping, wait_seconds)
            wait_seconds = min(2 * wait_seconds, self._policy.longest_wait_seconds)

    def stop(self) -> None:
        """Asks `run` to end: SIGTERM, then SIGKILL after the pod's grace period."""
        self._stopping.set()

    def hurry(self) -> None:
        """Ends the grace period."""
        self._stopping.set()
        self._hurrying.set()

    def _give_up_if_hopeless(self, num_starts: int, status: int) -> None:
        if not self.is_ready.is_set() and num_starts >= self._policy.max_starts_until_ready:
            raise PodNeverReadyError(
                f"{self.pod.name} ended {num_starts} times before it was ready, last with {describe_status(status)}: "
                "its log above says why"
            )

    async def _run_once(self) -> int:
        """One process from start to end; returns its exit status (negative: the signal that ended it)."""
        process = await self._start()
        self._watchdog.guard(process.pid)
        assert process.stdout is not None
        relay = asyncio.create_task(self._console.relay(self.pod.name, process.stdout))
        probing = asyncio.create_task(self._probe(process))
        stopping = asyncio.create_task(self._stop_when_asked(process))
        try:
            return await process.wait()
        finally:
            probing.cancel()
            stopping.cancel()
            # Children that outlived the pod's own process would keep its ports and its output open.
            end_group(process.pid, signal.SIGKILL)
            await asyncio.wait({relay}, timeout=self._policy.short_grace_seconds)
            relay.cancel()
            results = await asyncio.gather(relay, probing, stopping, return_exceptions=True)
            self._watchdog.release(process.pid)
            _raise_first([result for result in results if isinstance(result, Exception)])

    async def _start(self) -> asyncio.subprocess.Process:
        where = ", ".join(listener.url for listener in self.pod.listeners)
        self._say(f"starting at {where}")
        return await asyncio.create_subprocess_exec(
            *self.pod.command,
            env=dict(self.pod.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal reaches `local` alone, which stops its pods in order
        )

    async def _stop_when_asked(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        await self._end(process, self.pod.grace_seconds)

    async def _end(self, process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        """SIGTERM goes to the pod's own process, as in a container; SIGKILL to all of its group."""
        with suppress(ProcessLookupError):  # it ended by itself just now
            process.terminate()
        if not await _happens_within(self._hurrying, grace_seconds):
            self._say(f"still runs {grace_seconds:g} s after SIGTERM, killing it")
        end_group(process.pid, signal.SIGKILL)

    async def _probe(self, process: asyncio.subprocess.Process) -> None:
        started = time.monotonic()
        await _until_ok(self.pod.readiness.url, self._policy.readiness_poll_seconds)
        self._say(f"ready after {time.monotonic() - started:.1f} s")
        self.is_ready.set()
        await _until_unhealthy(self.pod.liveness)
        self._say(f"failed {self.pod.liveness.url} {self.pod.liveness.failure_threshold} times in a row, ending it")
        await self._end(process, self._policy.short_grace_seconds)

    def _say(self, text: str) -> None:
        self._console.say(f"{self.pod.name} {text}")


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        raise errors[0]


async def _happens_within(event: asyncio.Event, seconds: float) -> bool:
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


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    return f"signal {signal.Signals(-status).name}"
