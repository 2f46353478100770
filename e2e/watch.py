"""What the objects of one kind in a namespace went through: every state of them, with the moment it was seen.

A watch looks back as well as forward, so a scenario acts first and asks afterwards when something came about.
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from e2e.live_cluster import KubeObject, LiveCluster, uid_of

State = dict[str, KubeObject]
"""The objects that exist, by uid."""


class Watch:
    """Made by `watching`. Moments are seconds since the epoch, as the clients of `traffic` write them."""

    def __init__(self) -> None:
        self._states: list[tuple[float, State]] = [(time.time(), {})]
        self._is_new = threading.Condition()

    def take(self, kind_of_change: str, obj: KubeObject) -> None:
        """What the API server said: ADDED, MODIFIED or DELETED."""
        with self._is_new:
            state = dict(self._states[-1][1])
            state.pop(uid_of(obj), None)
            if kind_of_change != "DELETED":
                state[uid_of(obj)] = obj
            self._states.append((time.time(), state))
            self._is_new.notify_all()

    def first(self, holds: Callable[[State], bool], seconds: float, what: str, after: float = 0.0) -> float:
        """The first change, `after` or later, after which the objects are so; raises TimeoutError naming `what`."""
        deadline, looked_at = time.monotonic() + seconds, 0
        with self._is_new:
            while True:
                for moment, state in self._states[looked_at:]:
                    if moment >= after and holds(state):
                        return moment
                looked_at = len(self._states)
                if not self._is_new.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"watched {seconds:g} s in vain for {what}")

    def states_since(self, moment: float) -> list[State]:
        """That of the moment first."""
        with self._is_new:
            return [self.at(moment), *(state for seen, state in self._states if seen > moment)]

    def at(self, moment: float) -> State:
        """The objects as they then were."""
        with self._is_new:
            return next((state for seen, state in reversed(self._states) if seen <= moment), {})


@contextmanager
def watching(cluster: LiveCluster, kind: str, namespace: str) -> Iterator[Watch]:
    """Begun: what exists is known, as far as there is anything."""
    arguments = ("get", kind, f"--namespace={namespace}", "--watch", "--output-watch-events")
    command = cluster.command(*arguments, '-o=jsonpath={@}{"\\n"}')
    expected, watch = len(cluster.list(kind, namespace)), Watch()
    with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True) as kubectl:
        reader = threading.Thread(target=_read, args=(kubectl, watch))
        reader.start()
        try:
            watch.first(lambda state: len(state) >= expected, 30, f"the {expected} {kind} of namespace {namespace}")
            yield watch
        finally:
            kubectl.terminate()
            reader.join()


def _read(kubectl: subprocess.Popen[str], watch: Watch) -> None:
    assert kubectl.stdout is not None
    for line in kubectl.stdout:
        event = json.loads(line)
        watch.take(event["type"], event["object"])
