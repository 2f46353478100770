"""Keeps one local replica running: starts its pods, restarts them when one ends or hangs, and stops them.

What the kubelet does for a pod and the operator for a group of them, with the back-off shortened to what a person at a
terminal waits for. Pods of a group start and end together: a rank is of no use without the others.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_operator.errors import PodNeverReadyError
from kvasir_operator.local.console import Console
from kvasir_operator.local.pod_process import PodProcess, happens_within
from kvasir_operator.local.pods import LocalPod
from kvasir_operator.local.watchdog import Watchdog


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


@dataclass(frozen=True)
class _End:
    """The first of a replica's pods that ended, and with which exit status (negative: the signal that ended it)."""

    pod: LocalPod
    status: int


class ReplicaSupervisor:
    """Owns the processes of one replica's pods, the first of which takes the requests.

    `run` is to be awaited by the caller until it returns after `stop`.
    """

    def __init__(self, pods: Sequence[LocalPod], console: Console, watchdog: Watchdog, policy: RestartPolicy) -> None:
        self.pods = pods
        self.is_ready = asyncio.Event()  # set at the first readiness of the first pod, never cleared
        self._console = console
        self._watchdog = watchdog
        self._policy = policy
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()

    async def run(self) -> None:
        """Until stopped. Raises PodNeverReadyError when a pod keeps ending before the replica's first readiness."""
        num_starts, wait_seconds = 0, self._policy.first_wait_seconds
        while not self._stopping.is_set():
            started = time.monotonic()
            end = await self._run_once()
            lived = time.monotonic() - started
            if self._stopping.is_set():
                return
            num_starts += 1
            self._give_up_if_hopeless(num_starts, end)
            if lived >= self._policy.steady_seconds:
                wait_seconds = self._policy.first_wait_seconds
            what = "it" if len(self.pods) == 1 else f"all pods of {end.pod.replica}"
            self._say(
                end.pod,
                f"ended with {describe_status(end.status)} after {lived:.1f} s, starting {what} again in "
                f"{wait_seconds:g} s",
            )
            await happens_within(self._stopping, wait_seconds)
            wait_seconds = min(2 * wait_seconds, self._policy.longest_wait_seconds)

    def stop(self) -> None:
        """Asks `run` to end: SIGTERM, then SIGKILL after the first pod's grace period."""
        self._stopping.set()

    def hurry(self) -> None:
        """Ends the grace period."""
        self._stopping.set()
        self._hurrying.set()

    def _give_up_if_hopeless(self, num_starts: int, end: _End) -> None:
        if not self.is_ready.is_set() and num_starts >= self._policy.max_starts_until_ready:
            raise PodNeverReadyError(
                f"{end.pod.name} ended {num_starts} times before it was ready, last with "
                f"{describe_status(end.status)}: its log above says why"
            )

    async def _run_once(self) -> _End:
        """All processes from start to end; what one of them ends with, the others follow."""
        lives = [self._life_of(pod) for pod in self.pods]
        on_ready = {lives[0]: self.is_ready.set}  # what the others are means nothing for the replica
        tasks = {asyncio.create_task(life.run(on_ready.get(life, _nothing))): life for life in lives}
        stopping = asyncio.create_task(self._stop_when_asked(lives[0]))
        try:
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                tasks[task].end(self._policy.short_grace_seconds)
            if others:
                await asyncio.wait(others)
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ends = {task: _End(life.pod, task.result()) for task, life in tasks.items()}
        return next(end for task, end in ends.items() if task in done)

    def _life_of(self, pod: LocalPod) -> PodProcess:
        policy = self._policy
        return PodProcess(
            pod,
            self._console,
            self._watchdog,
            self._hurrying,
            policy.readiness_poll_seconds,
            policy.short_grace_seconds,
        )

    async def _stop_when_asked(self, first: PodProcess) -> None:
        """The first pod finishes its requests, for which it needs the others, which follow it."""
        await self._stopping.wait()
        first.end(first.pod.grace_seconds)

    def _say(self, pod: LocalPod, text: str) -> None:
        self._console.say(f"{pod.name} {text}")


def _nothing() -> None:
    """What it means for a replica that another than its first pod is ready."""


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    return f"signal {signal.Signals(-status).name}"
