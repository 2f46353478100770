"""Why a container does not start, or does not stay up: one reason and one sentence, from its status alone.

Our containers leave the end of their log as termination message (FallbackToLogsOnError), so an engine's own error is
reported from its first end on.
"""

import json
from collections.abc import Iterable

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import OWN_CONTAINERS
from kvasir_operator.kube.kinds import KubeObject

_IMAGE_FAILURES = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
_CONFIG_FAILURES = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
# A container that ended once may have been unlucky; a second end shows that starting it again does not help.
_ENDS_OF_A_LOOP = 2
_MAX_WORDS = 512  # characters of a container's last words


def own_containers(pod: KubeObject) -> list[KubeObject]:
    """Statuses of the containers that are Kvasir's, none before the first is to be started. Sidecars do not speak for
    the engine: they are ready, restart and end on their own."""
    return [each for each in pod.get("status", {}).get("containerStatuses", []) if each["name"] in OWN_CONTAINERS]


def all_containers(pod: KubeObject) -> list[KubeObject]:
    """Statuses of those that run before the others, or beside them, and of the others."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def num_restarts(containers: Iterable[KubeObject]) -> int:
    """`containers`: statuses."""
    return sum(each.get("restartCount", 0) for each in containers)


def is_sidecar(pod: KubeObject, name: str) -> bool:
    """Whether the init container runs beside the others as long as the pod does."""
    inits = pod.get("spec", {}).get("initContainers", [])
    return any(each["name"] == name and each.get("restartPolicy") == "Always" for each in inits)


def why_container_fails(container: KubeObject) -> tuple[Reason, str] | None:
    """None for one that has got over its start, was not tried yet, or ended well."""
    waiting = container.get("state", {}).get("waiting", {})
    name, cause = container["name"], waiting.get("reason", "")
    if cause in _IMAGE_FAILURES | _CONFIG_FAILURES:
        reason = Reason.IMAGE_PULL_FAILED if cause in _IMAGE_FAILURES else Reason.INVALID_CONTAINER_CONFIG
        return reason, f"container {name}: {cause}: {waiting.get('message', '')}".rstrip(": ")
    if container.get("started") or container.get("ready"):
        return None
    num_restarts, end = container.get("restartCount", 0), last_end(container)
    if cause == "CrashLoopBackOff" or num_restarts >= _ENDS_OF_A_LOOP:
        return Reason.CRASH_LOOPING, f"container {name} was restarted {num_restarts} times and last {end}"
    if last_termination(container).get("exitCode"):
        return Reason.CONTAINER_FAILED, f"container {name} {end}"
    return None


def last_termination(container: KubeObject) -> KubeObject:
    """How it ended last; empty when it never did."""
    ended: KubeObject = (
        container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
    )
    return ended


def has_ended_well(container: KubeObject) -> bool:
    """When it ended last."""
    return last_termination(container).get("exitCode") == 0


def last_end(container: KubeObject) -> str:
    """How it ended last, and what it said then."""
    ended = last_termination(container)
    if not ended:
        return "ended for an unknown reason"
    end = f"ended with exit code {ended.get('exitCode')} ({ended.get('reason', 'unknown')})"
    words = _last_words(ended.get("message", ""))
    return f"{end}: {words}" if words else end


def _last_words(log: str) -> str:
    """The last line that speaks of an error, else the last line; of an object of JSON its message alone."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return _message(next(reversed(errors or lines), ""))[:_MAX_WORDS]


def _message(line: str) -> str:
    """The end of a traceback says what was wrong."""
    try:
        fields = json.loads(line)
        ends = [fields["message"], *fields.get("exception", "").splitlines()[-1:]]
    except (ValueError, TypeError, KeyError, AttributeError):  # a line of text, or JSON that is none of ours
        return line
    return ": ".join(map(str, ends))
