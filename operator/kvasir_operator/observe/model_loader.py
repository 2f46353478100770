"""What the init containers that download models say: how far they have come, and why they ended.

The last line of a loader's log names the failure: `kvasir-runtime: error: REASON: what was seen`. Its progress is asked
over HTTP (engine_http.py), which tells a loader that fails again and again from one that has got over it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvasir_operator.api.conditions import DOWNLOAD_FAILURES, Reason
from kvasir_operator.api.labels import LOADERS
from kvasir_operator.kube.kinds import KubeObject, is_terminating
from kvasir_operator.observe.containers import last_termination, why_container_fails

_LAST_WORDS: Final = re.compile(r"^kvasir-runtime: error: (\w+): (.+)$", re.MULTILINE)
_MOST_WORDS: Final = 512  # characters
# A byte now and then comes late; after this long a person wants to know.
_IDLE_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 5.0
"""As often as a loader samples: a pass in between would see nothing new."""


@dataclass(frozen=True)
class DownloadProgress:
    """The loader's own words (GET /progress); `bytes_total` is 0 before it knows what there is."""

    address: str
    state: str
    bytes_done: int
    bytes_total: int
    bytes_per_second: float
    seconds_left: float | None
    idle_seconds: float

    @property
    def is_under_way(self) -> bool:
        """Past what ends it at once: a name or a token that is wrong, a disk that is too small."""
        return self.bytes_total > 0


def is_loader(container: KubeObject) -> bool:
    return container["name"] in LOADERS


def is_running(container: KubeObject) -> bool:
    return "running" in container.get("state", {})


def is_downloading(pod: KubeObject) -> bool:
    return not is_terminating(pod) and _running_loader(pod) is not None


def look_at_downloads_seconds(pods: Iterable[KubeObject]) -> float | None:
    """When to ask again; None where nothing is downloaded."""
    return _LOOK_SECONDS if any(map(is_downloading, pods)) else None


def why_loader_fails(container: KubeObject, progress: DownloadProgress | None) -> tuple[Reason, str] | None:
    """`progress` is of its present run; None for one that has ended well, or has got over its last failure."""
    if is_running(container):
        is_over = progress is not None and progress.is_under_way
        return None if is_over else _named_failure(container)
    return _named_failure(container) or why_container_fails(container)


def describe_download(pod: KubeObject, progress: DownloadProgress | None) -> str | None:
    """None where none is running. Without `progress` it cannot be asked: it has just begun, or is out of reach."""
    if _running_loader(pod) is None:
        return None
    if progress is None:
        return "the model is being downloaded; its loader has not said yet how far it is"
    return f"downloading {progress.address}: {_described(progress)}"


def engine_waits_since(pod: KubeObject) -> str | None:
    """From when on the engine itself could start (RFC 3339); None while it waits for a model."""
    loaders = [each for each in pod.get("status", {}).get("initContainerStatuses", []) if is_loader(each)]
    ends = [each.get("state", {}).get("terminated", {}) for each in loaders]
    if any(end.get("exitCode") != 0 for end in ends):
        return None
    return max((str(end["finishedAt"]) for end in ends), default=str(pod["metadata"]["creationTimestamp"]))


def _running_loader(pod: KubeObject) -> KubeObject | None:
    statuses: list[KubeObject] = pod.get("status", {}).get("initContainerStatuses", [])
    return next((each for each in statuses if is_loader(each) and is_running(each)), None)


def _named_failure(container: KubeObject) -> tuple[Reason, str] | None:
    """Of its last run that ended; None where that gave no reason of ours."""
    ended = last_termination(container)
    found = _LAST_WORDS.findall(ended.get("message", ""))
    if not ended.get("exitCode") or not found:
        return None
    name, message = found[-1]
    reason = next((each for each in DOWNLOAD_FAILURES if each.value == name), None)
    return None if reason is None else (reason, message[:_MOST_WORDS])


def _described(progress: DownloadProgress) -> str:
    if progress.state == "waiting":
        others = f", which has {_amount(progress)}" if progress.is_under_way else ""
        return f"waits for the replica that fills the cache{others}"
    if not progress.is_under_way:
        return "asking the source what there is"
    if progress.state == "verifying":
        return f"{_amount(progress)}, comparing checksums"
    if progress.idle_seconds >= _IDLE_SECONDS:
        return f"{_amount(progress)}, no byte for {progress.idle_seconds:.0f} s"
    pace = f"{_amount(progress)}, {progress.bytes_per_second / 1e6:.1f} MB/s"
    return pace if progress.seconds_left is None else f"{pace}, {_duration(progress.seconds_left)} left"


def _amount(progress: DownloadProgress) -> str:
    """In the units of disks and networks: powers of ten."""
    name, unit_bytes = ("GB", 1e9) if progress.bytes_total >= 1e9 else ("MB", 1e6)
    return f"{progress.bytes_done / unit_bytes:.2f} of {progress.bytes_total / unit_bytes:.2f} {name}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
