"""The way from a client to an engine: what arrives, what waits, where it goes, and what fails on the way."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    SECONDS,
    SHARE,
    TOKENS,
    Limits,
    Query,
    graph,
    number,
)
from charts.dashboards.promql import ROUTERS, named, share, some
from charts.dashboards.variables import ROUTERS as CHOICES

_REQUESTS = "kvasir_router_requests_total"
_PICKS = "kvasir_router_picks_total"
_READY = ROUTERS.of("kvasir_router_endpoints", 'state="ready"')

_NUMBERS = Section(
    "Now",
    [
        number(
            "Handled now", COUNT, "Requests between their first byte in and their last byte out, held ones included.",
            ROUTERS.sum("kvasir_router_in_flight"),
        ),
        number(
            "Held", COUNT,
            "Requests in the queue, for which no engine has room. Lasting: add replicas. At router.maxQueueSize "
            "further ones get 429.",
            ROUTERS.sum("kvasir_router_queue_depth"), Limits(1, 50),
        ),
        number(
            "Ready engines", COUNT,
            "That the router knows, of the router pod that knows fewest. 0 with requests: KvasirRouterWithoutEngines "
            "fires, clients get 503.",
            f"min({_READY})", Limits(1, 1, is_floor=True),
        ),
        number(
            "Ejected engines", COUNT,
            "Engines that get few or no requests because they fail or are slow. Look at their pods' logs; they come "
            "back by themselves once they answer.",
            ROUTERS.max("kvasir_router_ejected_endpoints"), Limits(1, 2),
        ),
        number(
            "Failed requests", SHARE,
            "Answers with a status of 500 or above, of all. Above 5 % KvasirRouterErrors fires. The row Failures says "
            "why.",
            share(ROUTERS.rate(_REQUESTS, "", 'code=~"5.."'), ROUTERS.rate(_REQUESTS)), Limits(0.01, 0.05),
        ),
        number(
            "The router's own time, p99", SECONDS,
            "From a body that is read to its dispatch, without the queue. Above some milliseconds the router lacks "
            "CPU: add router replicas.",
            ROUTERS.quantile(0.99, "kvasir_router_overhead_seconds"), Limits(0.01, 0.05), when_empty="no requests",
        ),
    ],
)  # fmt: skip

_TRAFFIC = Section(
    "What arrives",
    [
        graph(
            "Answers by status", PER_SECOND,
            "429: the queue is full, or a tenant is beyond its limits. 503: the wait is over, no engine is ready, or "
            "bodies and connections are too many. 502 and 504: engines failed.",
            Query(ROUTERS.rate(_REQUESTS, "code"), "{{code}}"), is_stacked=True,
        ),
        graph(
            "Answers by model", PER_SECOND, "Names that nobody serves are counted together.",
            Query(named(ROUTERS.rate(_REQUESTS, "model"), "model", "not served"), "{{model}}"), is_stacked=True,
        ),
        graph(
            "Time of answers", SECONDS, "From arrival to the last byte, the queue included.",
            Query(ROUTERS.quantile(0.5, "kvasir_router_request_duration_seconds"), "p50"),
            Query(ROUTERS.quantile(0.9, "kvasir_router_request_duration_seconds"), "p90"),
            Query(ROUTERS.quantile(0.99, "kvasir_router_request_duration_seconds"), "p99"), when_empty="no requests",
        ),
        graph(
            "Time to first byte of streams", SECONDS,
            "What a client waits, the queue included. Far above the engines' time to first token: requests are held, "
            "see Wait in the queue.",
            Query(ROUTERS.quantile(0.5, "kvasir_router_time_to_first_byte_seconds"), "p50"),
            Query(ROUTERS.quantile(0.9, "kvasir_router_time_to_first_byte_seconds"), "p90"),
            Query(ROUTERS.quantile(0.99, "kvasir_router_time_to_first_byte_seconds"), "p99"), when_empty="no streams",
        ),
        graph(
            "Connections", COUNT,
            "Clients' connections that are open, by router pod. At --max-connections further ones wait.",
            Query(ROUTERS.sum("kvasir_router_connections", "pod"), "{{pod}}"),
        ),
        graph(
            "Bodies held", BYTES,
            "Memory of request bodies, by router pod. Near the pod's memory limit: raise router.resources.memory.",
            Query(ROUTERS.sum("kvasir_router_held_body_bytes", "pod"), "{{pod}}"),
        ),
    ],
)  # fmt: skip

_QUEUE = Section(
    "What waits",
    [
        graph(
            "Held requests by tenant", COUNT,
            "Who waits. One tenant alone floods the service: give it limits (router.tenantLimits). All: add replicas.",
            Query(
                named(ROUTERS.sum("kvasir_router_queued_requests", "service, tenant"), "tenant", "no tenant"),
                "{{service}} {{tenant}}",
            ),
            is_stacked=True,
        ),
        graph(
            "Held prompt tokens by tenant", TOKENS, "The same in prompt tokens, by which the autoscaler reckons.",
            Query(
                named(ROUTERS.sum("kvasir_router_queued_tokens", "service, tenant"), "tenant", "no tenant"),
                "{{service}} {{tenant}}",
            ),
            is_stacked=True,
        ),
        graph(
            "Wait in the queue", SECONDS,
            "Of requests that were held. Near router.maxQueueWait they begin to be refused: add replicas.",
            Query(ROUTERS.quantile(0.5, "kvasir_router_queue_wait_seconds"), "p50"),
            Query(ROUTERS.quantile(0.9, "kvasir_router_queue_wait_seconds"), "p90"), when_empty="nothing was held",
        ),
    ],
)  # fmt: skip

_PLACES = Section(
    "Where it goes",
    [
        graph(
            "Picks", PER_SECOND,
            "Requests sent to each engine. Uneven is right where prompts share prefixes; one engine without any while "
            "it is ready is not: its page /debug/routing has the costs of the last picks.",
            # Prometheus keeps `endpoint` for the port's name, and calls the router's own label so.
            Query(ROUTERS.rate(_PICKS, "exported_endpoint"), "{{exported_endpoint}}"),
        ),
        graph(
            "Picks by policy", PER_SECOND,
            "Which rule chose. A policy that is not the service's own: the router fell back for want of data.",
            Query(ROUTERS.rate(_PICKS, "policy"), "{{policy}}"), is_stacked=True,
        ),
        graph(
            "Engines by state", COUNT,
            "As the router pod sees it that sees most. not_ready: loading or draining. unreachable: no answer, look "
            "at the network policies and the pods.",
            Query(ROUTERS.max("kvasir_router_endpoints", "state"), "{{state}}"), is_stacked=True,
        ),
        graph(
            "Prompt tokens expected in caches", SHARE,
            "Of those sent, how many the router believes to be cached where it sends them. Compare with what engines "
            "find (KV cache and prefixes): far apart, KV events are lost.",
            Query(
                share(ROUTERS.rate("kvasir_router_prefix_hit_tokens_total"),
                      ROUTERS.rate("kvasir_router_prompt_tokens_total")),
                "expected",
            ), highest=1, when_empty="no prompts",
        ),
        graph(
            "The router's own time", SECONDS, "From a body that is read to its dispatch, without the queue.",
            Query(ROUTERS.quantile(0.5, "kvasir_router_overhead_seconds"), "p50"),
            Query(ROUTERS.quantile(0.99, "kvasir_router_overhead_seconds"), "p99"), when_empty="no requests",
        ),
        graph(
            "Answers by revision", PER_SECOND,
            "During a rollout or canary: the new revision's part, and what it answers. Worse codes than the old "
            "one's: roll back.",
            Query(ROUTERS.rate("kvasir_router_revision_requests_total", "revision, code"), "{{revision}} {{code}}"),
            is_stacked=True,
        ),
    ],
)  # fmt: skip

_FAILURES = Section(
    "Failures, and what became of them",
    [
        graph(
            "Failed attempts", PER_SECOND,
            "Attempts at engines that failed, by reason. Clients see none of them as long as another engine can go "
            "on.",
            Query(some(ROUTERS.rate("kvasir_router_upstream_errors_total", "reason")), "{{reason}}"), is_stacked=True,
            when_empty="none so far",
        ),
        graph(
            "Failed attempts by revision", PER_SECOND,
            "Only the new revision fails: the rollout is at fault, roll back. All do: look at nodes and network.",
            Query(
                some(ROUTERS.rate("kvasir_router_revision_upstream_errors_total", "revision, reason")),
                "{{revision}} {{reason}}",
            ), is_stacked=True, when_empty="none so far",
        ),
        graph(
            "Attempts elsewhere", PER_SECOND,
            "Repeated on another engine, by reason; and not repeated, because too many were already: then clients get "
            "errors.",
            Query(some(ROUTERS.rate("kvasir_router_retries_total", "reason")), "{{reason}}"),
            Query(ROUTERS.rate("kvasir_router_retries_refused_total"), "refused"), when_empty="none so far",
        ),
        graph(
            "Streams continued elsewhere", PER_SECOND,
            "Streams that another engine went on with, since theirs was lost, or drained and handed them over (moved); "
            "their clients saw one stream. Many lost ones without a rollout: engines crash, see their restarts.",
            Query(ROUTERS.rate("kvasir_router_streams_resumed_total", "reason"), "{{reason}}"), is_stacked=True,
        ),
    ],
)  # fmt: skip

_GATEWAY = Section(
    "Services behind the gateway",
    [
        graph(
            "Ready engines by service", COUNT,
            "Of the services that the gateway serves. 0 is a service at zero, or one whose pods do not become ready.",
            Query(
                ROUTERS.max(
                    "kvasir_router_service_endpoints", "service_namespace, inference_service", 'state="ready"'
                ),
                "{{service_namespace}}/{{inference_service}}",
            ), when_empty="no gateway",
        ),
        graph(
            "Held requests by service", COUNT,
            "Of gateway pods together. A service at zero holds requests while it wakes; longer than its start takes: "
            "`kubectl describe kvsvc`.",
            Query(
                ROUTERS.sum("kvasir_router_service_queue_depth", "service_namespace, inference_service"),
                "{{service_namespace}}/{{inference_service}}",
            ), is_stacked=True, when_empty="no gateway",
        ),
    ],
)  # fmt: skip

ROUTER = Board(
    "router", "Router", "The way from clients to engines: what arrives, what waits, where it goes, what fails.",
    CHOICES, [_NUMBERS, _TRAFFIC, _QUEUE, _PLACES, _FAILURES, _GATEWAY],
)  # fmt: skip
