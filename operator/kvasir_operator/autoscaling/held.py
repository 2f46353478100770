"""What routers hold for a service, asked of each of them: at zero that is all there is to know, and no scrape is soon
enough. And which pods the installation's gateway has, the router of many services."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.api.labels import ROUTER_ADMIN_PORT
from kvasir_operator.errors import KubeApiError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import POD, KubeObject
from kvasir_operator.observe.engine_http import ask_each

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
_REQUESTS, _TOKENS = "kvasir_router_queued_requests", "kvasir_router_queued_tokens"


@dataclass(frozen=True)
class Held:
    """Requests that wait for an engine, and their prompt tokens."""

    num_requests: float
    num_tokens: float


async def read_held(addresses: Iterable[str], service: str | None, port: int = ROUTER_ADMIN_PORT) -> Held | None:
    """Of all routers together that answer; None where none does. `service` None: the routers have no other."""
    answers = await ask_each(addresses, port, "/metrics", lambda text: held_in(text, service), TIMEOUT_SECONDS)
    known = [answer for answer in answers if answer is not None]
    if not known:
        return None
    return Held(sum(each.num_requests for each in known), sum(each.num_tokens for each in known))


def held_in(text: str, service: str | None) -> Held:
    """`text`: a router's metrics, of which only these two are parsed."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith((_REQUESTS, _TOKENS)))
    samples = [sample for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]
    own = [sample for sample in samples if service is None or sample.labels.get("service") == service]
    return Held(*(sum(sample.value for sample in own if sample.name == name) for name in (_REQUESTS, _TOKENS)))


async def gateway_pods(client: KubeClient, gateway: GatewayDefaults) -> Sequence[KubeObject]:
    """Empty where they cannot be listed: roles that somebody else made may not let the operator see them."""
    try:
        return await client.list(POD, gateway.namespace, dict(gateway.pod_labels))
    except KubeApiError as error:
        logger.debug("the gateway's pods cannot be listed: %s", error)
        return ()
