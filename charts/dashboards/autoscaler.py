"""The autoscaler: what it wants, what it decides by, and what holds it."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import COUNT, SECONDS, SHARE, TOKENS, TOKENS_PER_SECOND, Limits, Query, graph, number
from charts.dashboards.promql import ABOUT_ROLE, ROLE_PODS, SERVICE_PODS, aggregate, ratio, some
from charts.dashboards.variables import SCALED

_PREFIX = "kvasir_operator_autoscaling"
_ABOUT = "service_namespace, inference_service, role"
_OF = "namespace, inference_service, role"
_ABOUT_LEGEND = "{{service_namespace}}/{{inference_service}} {{role}}"
_OF_LEGEND = "{{namespace}}/{{inference_service}} {{role}}"
_NONE = "no service with autoscaling"


def _wake_time(quantile: float) -> str:
    """Over all that is shown: wakes are few."""
    return f"histogram_quantile({quantile}, {SERVICE_PODS.increase('kvasir_router_wake_seconds_bucket', 'le')})"


_NUMBERS = Section(
    "Now",
    [
        number(
            "Wanted replicas", COUNT, "Of all chosen roles together.",
            f"sum({ABOUT_ROLE.max(f'{_PREFIX}_wanted_replicas', _ABOUT)})", when_empty=_NONE,
        ),
        number(
            "Needed replicas", COUNT,
            "What the demand comes to, before bounds, windows and policies. Above what is wanted for long: "
            "maxReplicas or a policy holds it back.",
            f"sum({ABOUT_ROLE.max(f'{_PREFIX}_needed_replicas', _ABOUT)})", when_empty=_NONE,
        ),
        number(
            "Roles that are held", COUNT,
            "Roles that stay as they are for want of metrics. The condition ScalingActive of the service names what "
            "is missing; mostly Prometheus does not scrape its pods.",
            f"sum({ABOUT_ROLE.max(f'{_PREFIX}_held', _ABOUT)})", Limits(1, 2), when_empty=_NONE,
        ),
        number(
            "Changes", COUNT,
            "Decisions that changed replicas, in the time that is shown. Many up and down: widen the windows of "
            "behavior.",
            ABOUT_ROLE.increase(f"{_PREFIX}_decisions_total"), when_empty="none so far",
        ),
        number(
            "Held by routers", COUNT, "Requests that wait for an engine; at zero they are what wakes a service.",
            SERVICE_PODS.sum("kvasir_router_queued_requests"), when_empty="no router",
        ),
        number(
            "KV cache in use", SHARE,
            "Tokens in use over capacity. Scaling aims at targetKVCacheUsage, 0.75 by default.",
            ratio(ROLE_PODS.sum("kvasir_kv_cache_used_tokens"), ROLE_PODS.sum("kvasir_kv_cache_capacity_tokens")),
            when_empty="no engine",
        ),
    ],
)  # fmt: skip

_FROM_ZERO = Section(
    "From zero",
    [
        number(
            "Wakes", COUNT,
            "Times that a request had to wait for the first ready engine, in the time that is shown. Many: lengthen "
            "scaleToZeroAfter; with minReplicas above 0 the only engine was lost.",
            SERVICE_PODS.increase("kvasir_router_wake_seconds_count"), when_empty="no router",
        ),
        number(
            "Wake time, p50", SECONDS,
            "From the first request at zero to the first that an engine was sent, in the time that is shown. It is an "
            "engine's start: a cache of the model near by shortens it.",
            _wake_time(0.5), when_empty="no wakes",
        ),
        number(
            "Wake time, p90", SECONDS,
            "The same of nine wakes of ten. Near router.maxQueueWait requests are refused before an engine is there.",
            _wake_time(0.9), when_empty="no wakes",
        ),
    ],
)  # fmt: skip

_DECISIONS = Section(
    "What is decided",
    [
        graph(
            "Replicas", COUNT,
            "Wanted, and engines that are scraped. Scraped below wanted for longer than a start takes: the service's "
            "status says what its pods wait for.",
            Query(ABOUT_ROLE.max(f"{_PREFIX}_wanted_replicas", _ABOUT), f"{_ABOUT_LEGEND} wanted"),
            Query(
                aggregate("count", _OF, ROLE_PODS.of("kvasir_http_requests_in_flight")), f"{_OF_LEGEND} scraped"
            ), when_empty=_NONE,
        ),
        graph(
            "Needed and wanted", COUNT,
            "Needed is the demand, as a fraction. Wanted follows at once upwards and after its window downwards; a "
            "forecast only raises it.",
            Query(ABOUT_ROLE.max(f"{_PREFIX}_needed_replicas", _ABOUT), f"{_ABOUT_LEGEND} needed"),
            Query(ABOUT_ROLE.max(f"{_PREFIX}_wanted_replicas", _ABOUT), f"{_ABOUT_LEGEND} wanted"), when_empty=_NONE,
        ),
        graph(
            "Changes by reason", COUNT,
            "Decisions in each window. TimeToFirstToken and InterTokenLatency often: the target is too high for the "
            "SLO, lower targetKVCacheUsage.",
            Query(
                some(f"sum by ({_ABOUT}, reason) (increase({ABOUT_ROLE.of(f'{_PREFIX}_decisions_total')}[5m]))"),
                f"{_ABOUT_LEGEND}: {{{{reason}}}}",
            ), is_stacked=True, when_empty="none so far",
        ),
        graph(
            "Held", COUNT,
            "1 where a role stays as it is for want of metrics; what is there goes on serving. See the condition of "
            "the service.",
            Query(ABOUT_ROLE.max(f"{_PREFIX}_held", _ABOUT), _ABOUT_LEGEND), limits=Limits(1, 1), highest=1,
            when_empty=_NONE,
        ),
    ],
)  # fmt: skip

_INPUTS = Section(
    "What it is decided by",
    [
        graph(
            "KV tokens", TOKENS, "In use, and the room of all engines: the first of the demands.",
            Query(ROLE_PODS.sum("kvasir_kv_cache_used_tokens", _OF), f"{_OF_LEGEND} used"),
            Query(ROLE_PODS.sum("kvasir_kv_cache_capacity_tokens", _OF), f"{_OF_LEGEND} room"),
        ),
        graph(
            "Prompt tokens that wait", TOKENS,
            "In engines, still to compute, and held by routers. Over the prefill speed it is the wait that a new "
            "request has.",
            Query(ROLE_PODS.sum("kvasir_uncached_tokens", _OF), f"{_OF_LEGEND} in engines"),
            Query(SERVICE_PODS.sum("kvasir_router_queued_tokens", "namespace, inference_service"),
                  "{{namespace}}/{{inference_service}} held"), is_stacked=True,
        ),
        graph(
            "Busiest replica", SHARE,
            "The fullest engine of each role: load that is uneven makes replicas too few though the mean is low.",
            Query(ROLE_PODS.max("kvasir_kv_cache_usage_ratio", _OF), _OF_LEGEND), limits=Limits(0.8, 0.95), highest=1,
        ),
        graph(
            "Prefill speed", TOKENS_PER_SECOND,
            "Measured by engines, the mean by role: the capacity that prefill replicas are counted by.",
            Query(aggregate("avg", _OF, ROLE_PODS.of("kvasir_prefill_tokens_per_second")), _OF_LEGEND),
            when_empty="no prompts yet",
        ),
        graph(
            "Time to first token, p90", SECONDS,
            "Guarded by slo.timeToFirstToken. Missed with few tokens waiting: prompts are long.",
            Query(ROLE_PODS.quantile(0.9, "kvasir_time_to_first_token_seconds", _OF), _OF_LEGEND),
            when_empty="no requests",
        ),
        graph(
            "Time between tokens, p90", SECONDS, "Guarded by slo.interTokenLatency.",
            Query(ROLE_PODS.quantile(0.9, "kvasir_inter_token_latency_seconds", _OF), _OF_LEGEND),
            when_empty="no requests",
        ),
    ],
)  # fmt: skip

AUTOSCALER = Board(
    "autoscaler", "Autoscaler", "What the autoscaler wants, what it decides by, and what holds it.",
    SCALED, [_NUMBERS, _FROM_ZERO, _DECISIONS, _INPUTS],
)  # fmt: skip
