"""Who may reach a service's pods: NetworkPolicies, which act where the cluster's network plugin enforces them.

Engines believe their router, so only it (of the service's own, or the gateway), the operator, Prometheus and the
engines of the same service reach them. Engines' metrics and their API share a port, which a policy cannot part: so
Prometheus is let in by its pods' labels and not from everywhere, and what an engine believes is besides guarded by a
secret (router_secret.py). Kubelets reach the pods of their own node in any case. What pods send out is not restricted:
models come from anywhere.
"""

from collections.abc import Mapping
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.defaults import GatewayDefaults, NetworkPeer, NetworkPeers
from kvasir_operator.api.model import InferenceService, ServiceSpec
from kvasir_operator.resources.kv_events import kv_events_ports
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.settings import OperatorSettings

# Kubernetes labels every namespace with its own name.
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"


def network_policies(service: InferenceService, settings: OperatorSettings) -> list[dict[str, Any]]:
    """One for the engines, one for a router of the service's own; none where the installation leaves them out."""
    if not settings.network_policies:
        return []
    engines, router = _selector(service, *labels.ENGINE_ROLES), _selector(service, labels.ROLE_ROUTER)
    observers = _observers(settings.defaults.network_peers)
    # Behind the gateway a router of the service's own may still end its streams.
    routers = [{"podSelector": router}, *_gateways(service, settings.defaults.gateway)]
    event_ports = kv_events_ports(_most_data_ranks(service.spec))
    engine_rules = [
        {"from": [*routers, *observers], "ports": _ports(labels.ENGINE_HTTP_PORT)},
        # KV events hold the prompts' tokens.
        {"from": routers, "ports": _ports(*event_ports.values())},
        # Blocks of KV and collectives of a group travel on ports of their libraries' choice.
        {"from": [{"podSelector": engines}]},
    ]
    engine_policy = _policy(service, labels.engine_name(service.name), None, engines, engine_rules)
    if service.is_behind_gateway:
        return [engine_policy]
    router_rules: list[dict[str, Any]] = [
        {"ports": _ports(labels.ROUTER_HTTP_PORT)},
        {"from": [{"podSelector": router}], "ports": _ports(labels.ROUTER_PEERS_PORT)},
    ]
    if observers:  # an empty `from` would let in everyone
        router_rules.append({"from": observers, "ports": _ports(labels.ROUTER_ADMIN_PORT)})
    router_name = labels.router_name(service.name)
    return [engine_policy, _policy(service, router_name, labels.ROLE_ROUTER, router, router_rules)]


def _most_data_ranks(spec: ServiceSpec) -> int:
    """Of any of its engines."""
    split = spec.disaggregation
    if split is None:
        return spec.parallelism.data
    return max(split.prefill.parallelism.data, split.decode.parallelism.data)


def _gateways(service: InferenceService, gateway: GatewayDefaults | None) -> list[dict[str, Any]]:
    """The gateway's pods, where they serve this service."""
    if gateway is None or not service.is_behind_gateway:
        return []
    return [_peer(NetworkPeer({_NAMESPACE_NAME: gateway.namespace}, gateway.pod_labels))]


def _observers(peers: NetworkPeers) -> list[dict[str, Any]]:
    """The operator, which asks engines for their load, and who scrapes metrics."""
    observers = peers.metrics if peers.operator is None else (peers.operator, *peers.metrics)
    return [_peer(peer) for peer in observers]


def _peer(peer: NetworkPeer) -> dict[str, Any]:
    """Without labels: every namespace, every pod."""
    return {"namespaceSelector": _by_labels(peer.namespace_labels), "podSelector": _by_labels(peer.pod_labels)}


def _by_labels(wanted: Mapping[str, str]) -> dict[str, Any]:
    return {"matchLabels": dict(wanted)} if wanted else {}


def _selector(service: InferenceService, *roles: str) -> dict[str, Any]:
    return {
        "matchLabels": {labels.SERVICE_LABEL: service.name},
        "matchExpressions": [{"key": labels.ROLE_LABEL, "operator": "In", "values": list(roles)}],
    }


def _ports(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _policy(
    service: InferenceService, name: str, role: str | None, selector: dict[str, Any], rules: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, name, role),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": rules},
    }
