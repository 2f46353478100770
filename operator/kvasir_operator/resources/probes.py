"""Probes of our containers: ready means "send me requests", healthy means "I make progress"."""

from typing import Any


def http_probe(path: str, port: str, period_seconds: int, failure_threshold: int) -> dict[str, Any]:
    """Fails after `failure_threshold` checks in a row, one every `period_seconds`."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }
