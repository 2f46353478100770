"""Probes of our containers: ready means "send me requests", healthy means "I make progress"."""

from typing import Any, Final

# With three checks of at most 5 s each, a process that does not answer is found within 20 s, one that answers "no"
# within 15 s. An engine's steps, however long, delay no answer: another process computes them.
_LIVENESS_PERIOD_SECONDS: Final = 5
# What hangs cannot drain, so the time to drain is not waited for.
_HUNG_GRACE_SECONDS: Final = 5


def http_probe(path: str, port: str, period_seconds: int, failure_threshold: int) -> dict[str, Any]:
    """Fails after `failure_threshold` checks in a row, one every `period_seconds`."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }


def liveness_probe(port: str) -> dict[str, Any]:
    """Restarts a container that hangs; how long work may stand still until `/health` says so is the program's own."""
    probe = http_probe("/health", port, _LIVENESS_PERIOD_SECONDS, failure_threshold=3)
    return {**probe, "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS}
