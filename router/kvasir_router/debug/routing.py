"""The router's routing as plain JSON, and the page that shows it.

No prompt, key or tenant is in it: whoever reaches the admin port may look.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvasir_router.debug.decisions import Decision, DecisionLog
from kvasir_router.service.service import Service

PAGE = Path(__file__).with_name("routing.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def describe_routing(
    services: Iterable[Service], decisions: DecisionLog, chosen: str | None, now: float, unix_time: float
) -> dict[str, Any]:
    """Of all services, or of the one that is called `chosen`; `names` are those of all. `now` is on their clock."""
    services = tuple(services)
    return {
        "time": unix_time,
        "names": sorted(service.name for service in services),
        "services": [
            _describe_service(service, decisions, now) for service in services if chosen in (None, service.name)
        ],
    }


def _describe_service(service: Service, decisions: DecisionLog, now: float) -> dict[str, Any]:
    replicas = sorted(service.describe(), key=lambda replica: str(replica["url"]))
    num_blocks = sum(replica["prefix_blocks"] for replica in replicas)
    for replica in replicas:
        replica["cache_share"] = replica["prefix_blocks"] / num_blocks if num_blocks else 0.0
    return {
        "name": service.name,
        "policy": service.picker.policy_name,
        "num_waiting": service.admission.num_waiting,
        "replicas": replicas,
        "decisions": [_describe_decision(decision, now) for decision in decisions if decision.service == service.name],
    }


def _describe_decision(decision: Decision, now: float) -> dict[str, Any]:
    costs = [asdict(cost) | {"cost_seconds": sum(cost.terms_seconds.values())} for cost in decision.costs]
    return asdict(decision) | {"age_seconds": now - decision.made_at, "costs": costs}
