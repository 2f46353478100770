"""What users get, what it costs, and whether the next dashboard is needed."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import COUNT, PER_SECOND, SECONDS, SHARE, TOKENS_PER_SECOND, Limits, Query, graph, number
from charts.dashboards.promql import ABOUT_SERVICE, SERVICE_PODS, aggregate, named, ratio, share
from charts.dashboards.variables import SERVICES

_REQUESTS = "kvasir_router_requests_total"
_FAILED = 'code=~"5.."'
_TTFT, _ITL = "kvasir_time_to_first_token_seconds", "kvasir_inter_token_latency_seconds"
_E2E = "kvasir_e2e_request_latency_seconds"
_READY = ABOUT_SERVICE.max("kvasir_operator_service_ready", "service_namespace, inference_service")
_SERVICE = "namespace, inference_service"
_ROLE = "namespace, inference_service, role"

_NUMBERS = Section(
    "Now",
    [
        number(
            "Services that are not ready", COUNT,
            "Services that serve no request, not even after a wake. `kubectl describe kvsvc NAME` names the reason; "
            "the graph Ready below says which they are.",
            f"sum({_READY} == bool 0)", Limits(1, 2),
        ),
        number(
            "Requests", PER_SECOND,
            "Answers of routers a second. Nothing arrives though clients ask: look at the Service that they reach.",
            SERVICE_PODS.rate(_REQUESTS),
        ),
        number(
            "Failed requests", SHARE,
            "Answers with a status of 500 or above, of all. Above 5 % KvasirRouterErrors fires: the Router dashboard "
            "says whether engines fail or whether there are none.",
            share(SERVICE_PODS.rate(_REQUESTS, "", _FAILED), SERVICE_PODS.rate(_REQUESTS)), Limits(0.01, 0.05),
        ),
        number(
            "Time to first token, p90", SECONDS,
            "One request in ten waits longer for its first token. Compare with the service's SLO; when it is missed, "
            "look at what waits (Requests, below) and at the queue of the Router dashboard.",
            SERVICE_PODS.quantile(0.9, _TTFT), when_empty="no requests",
        ),
        number(
            "Time between tokens, p90", SECONDS,
            "One token in ten comes later than this after the one before. Too slow with little waiting: batches are "
            "too large, lower maxNumSeqs or add replicas.",
            SERVICE_PODS.quantile(0.9, _ITL), when_empty="no requests",
        ),
        number(
            "Fullest KV cache", SHARE,
            "Share of KV blocks in use of the engine that uses most. Near 1 requests wait and are preempted: add "
            "replicas or memory, see the dashboard KV cache and prefixes.",
            SERVICE_PODS.max("kvasir_kv_cache_usage_ratio"), Limits(0.8, 0.95), when_empty="no engine",
        ),
    ],
)  # fmt: skip

_USERS = Section(
    "What users get",
    [
        graph(
            "Answers by status", PER_SECOND,
            "Answers of routers a second. 429 and 503 are refusals: the queue is full, a tenant is beyond its limits, "
            "or no engine is ready. 502 and 504 are engines that failed.",
            Query(SERVICE_PODS.rate(_REQUESTS, "code"), "{{code}}"), is_stacked=True,
        ),
        graph(
            "Time to first token", SECONDS,
            "From the arrival at an engine to its first token; the router's queue comes before it. When p99 leaves "
            "p50 behind, single prompts are long or single engines are full.",
            Query(SERVICE_PODS.quantile(0.5, _TTFT), "p50"),
            Query(SERVICE_PODS.quantile(0.9, _TTFT), "p90"),
            Query(SERVICE_PODS.quantile(0.99, _TTFT), "p99"), when_empty="no requests",
        ),
        graph(
            "Time between tokens", SECONDS,
            "As a reader of a stream sees it. It grows with the batch and with prefills in the same step: lower "
            "maxNumBatchedTokens, or part prefill from decode.",
            Query(SERVICE_PODS.quantile(0.5, _ITL), "p50"),
            Query(SERVICE_PODS.quantile(0.9, _ITL), "p90"),
            Query(SERVICE_PODS.quantile(0.99, _ITL), "p99"), when_empty="no requests",
        ),
        graph(
            "Answers by model", PER_SECOND,
            "Which model the load is for. Names that nobody serves are counted together.",
            Query(named(SERVICE_PODS.rate(_REQUESTS, "model"), "model", "not served"), "{{model}}"), is_stacked=True,
        ),
        graph(
            "Whole answers", SECONDS,
            "From arrival to the last token: mostly their length. Clients' time limits must lie above p99.",
            Query(SERVICE_PODS.quantile(0.5, _E2E), "p50"),
            Query(SERVICE_PODS.quantile(0.9, _E2E), "p90"),
            Query(SERVICE_PODS.quantile(0.99, _E2E), "p99"), when_empty="no requests",
        ),
        graph(
            "Tokens", TOKENS_PER_SECOND,
            "Prompt tokens that arrived and tokens that were generated. What generating costs is the engines' time; "
            "prompts cost what the prefix cache does not have.",
            Query(SERVICE_PODS.rate("kvasir_prompt_tokens_total"), "prompt"),
            Query(SERVICE_PODS.rate("kvasir_generation_tokens_total"), "generated"),
        ),
    ],
)  # fmt: skip

_CAPACITY = Section(
    "What there is to serve them",
    [
        graph(
            "Ready", COUNT,
            "1 where a service serves or would after its wake, 0 where it does not. At 0 for 15 minutes "
            "KvasirServiceNotReady fires; docs/troubleshooting.md explains every reason.",
            Query(_READY, "{{service_namespace}}/{{inference_service}}"), highest=1,
        ),
        graph(
            "Engines that are scraped", COUNT,
            "By service and role. Fewer than `status.roles` says are ready: Prometheus does not reach them "
            "(networkPolicies.metricsFrom, monitoring.labels).",
            Query(
                aggregate("count", _ROLE, SERVICE_PODS.of("kvasir_http_requests_in_flight")),
                "{{namespace}}/{{inference_service}} {{role}}",
            ), is_stacked=True,
        ),
        graph(
            "KV cache in use", SHARE,
            "The mean over a service's engines by role, and the fullest of them all. Mean high: add replicas. Only "
            "the fullest high: load is uneven, see Picks of the Router dashboard.",
            Query(
                aggregate("avg", _ROLE, SERVICE_PODS.of("kvasir_kv_cache_usage_ratio")),
                "{{namespace}}/{{inference_service}} {{role}}",
            ),
            Query(SERVICE_PODS.max("kvasir_kv_cache_usage_ratio"), "fullest"), limits=Limits(0.8, 0.95), highest=1,
        ),
        graph(
            "Requests", COUNT,
            "In batches, waiting in engines for a place, and held by routers. Waiting and held for long means too few "
            "replicas.",
            Query(SERVICE_PODS.sum("kvasir_num_requests_running"), "running"),
            Query(SERVICE_PODS.sum("kvasir_num_requests_waiting"), "waiting in engines"),
            Query(SERVICE_PODS.sum("kvasir_router_queue_depth"), "held by routers"), is_stacked=True,
        ),
        graph(
            "Prompt tokens found in the prefix cache", SHARE,
            "By service. A fall after a rollout is normal, new engines begin empty; a lasting one means other "
            "prompts, or engines too small for what comes again.",
            Query(
                ratio(
                    SERVICE_PODS.rate("kvasir_prefix_cache_hits_total", _SERVICE),
                    SERVICE_PODS.rate("kvasir_prefix_cache_queries_total", _SERVICE),
                ),
                "{{namespace}}/{{inference_service}}",
            ), highest=1, when_empty="no prompts",
        ),
        graph(
            "Preemptions", PER_SECOND,
            "Requests a second that were set back because the KV cache was full; their tokens are computed twice. "
            "More than now and then: add replicas, or lower maxNumSeqs.",
            Query(
                SERVICE_PODS.rate("kvasir_num_preemptions_total", _SERVICE),
                "{{namespace}}/{{inference_service}}",
            ),
        ),
    ],
)  # fmt: skip

OVERVIEW = Board(
    "overview", "Overview", "What users of the services get, and what serves them. Begin here.",
    SERVICES, [_NUMBERS, _USERS, _CAPACITY],
)  # fmt: skip
