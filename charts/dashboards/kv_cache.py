"""The KV cache: how full it is, what prefixes are found in it, and whether routers know."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import (
    COUNT,
    EVENTS_PER_SECOND,
    PER_SECOND,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    Limits,
    Query,
    graph,
    number,
)
from charts.dashboards.promql import ENGINES, SERVICE_PODS, aggregate, ratio
from charts.dashboards.variables import ENGINES as CHOICES

_USAGE = "kvasir_kv_cache_usage_ratio"
_FOUND, _ASKED = "kvasir_prefix_cache_hits_total", "kvasir_prefix_cache_queries_total"
_FULL = Limits(0.8, 0.95)
_ROLE = "namespace, inference_service, role"

_NUMBERS = Section(
    "Now",
    [
        number(
            "Fullest", SHARE,
            "Share of blocks in use of the engine that uses most. Above 95 % for 10 minutes with requests waiting "
            "KvasirKvCacheFull fires: add replicas or memory.",
            ENGINES.max(_USAGE), _FULL,
        ),
        number(
            "In use", TOKENS, "Room of the blocks in use, of all chosen engines.",
            ENGINES.sum("kvasir_kv_cache_used_tokens"),
        ),
        number(
            "Capacity", TOKENS,
            "Room of all blocks. It follows from memoryUtilization, the pod's memory and the model's KV size.",
            ENGINES.sum("kvasir_kv_cache_capacity_tokens"),
        ),
        number(
            "Prefix tokens found", SHARE,
            "Prompt tokens that were cached, of all. What is found costs no prefill. Chats and shared system prompts "
            "give more than a half; with unrelated prompts 0 is right.",
            ratio(ENGINES.rate(_FOUND), ENGINES.rate(_ASKED)), when_empty="no prompts",
        ),
        number(
            "Preempted", COUNT,
            "Requests set back for want of blocks, in the time that is shown. Each is computed again: add replicas, "
            "or lower maxNumSeqs.",
            ENGINES.increase("kvasir_num_preemptions_total"), Limits(1, 100),
        ),
        number(
            "Events behind", SECONDS,
            "How far the router that is furthest behind is with an engine's KV events. Above a second it places by "
            "yesterday's cache: the router lacks CPU, or the clocks of nodes differ.",
            SERVICE_PODS.max("kvasir_router_kv_event_lag_seconds"), Limits(0.5, 2), when_empty="no KV events",
        ),
    ],
)  # fmt: skip

_ROOM = Section(
    "Room",
    [
        graph(
            "In use", SHARE, "Share of blocks in use by engine. Only one is high: see Picks of the Router dashboard.",
            Query(ENGINES.max(_USAGE, "pod"), "{{pod}}"), limits=_FULL, highest=1,
        ),
        graph(
            "Tokens in use and capacity", TOKENS,
            "By service and role. Where use follows capacity for long, more of it would be used: add replicas.",
            Query(
                ENGINES.sum("kvasir_kv_cache_used_tokens", _ROLE), "{{namespace}}/{{inference_service}} {{role}} used"
            ),
            Query(
                ENGINES.sum("kvasir_kv_cache_capacity_tokens", _ROLE),
                "{{namespace}}/{{inference_service}} {{role}} capacity",
            ),
        ),
        graph(
            "Tokens a running request holds", TOKENS,
            "Tokens in use over running requests. It times maxNumSeqs is the capacity that an engine needs.",
            Query(
                ratio(
                    ENGINES.sum("kvasir_kv_cache_used_tokens", _ROLE),
                    f"({ENGINES.sum('kvasir_num_requests_running', _ROLE)} > 0)",
                ),
                "{{namespace}}/{{inference_service}} {{role}}",
            ), when_empty="nothing runs",
        ),
        graph(
            "Waiting", COUNT,
            "Requests without a place in the batch, by engine. With a full cache it is blocks that they wait for, "
            "else seats.",
            Query(ENGINES.sum("kvasir_num_requests_waiting", "pod"), "{{pod}}"),
        ),
        graph(
            "Preemptions", PER_SECOND,
            "By engine and mode. `recompute`: the request's tokens are computed again. Lasting: maxNumSeqs is too "
            "high for the memory.",
            Query(ENGINES.rate("kvasir_num_preemptions_total", "pod, mode"), "{{pod}} {{mode}}"),
        ),
        graph(
            "Size in blocks", COUNT,
            "Blocks that each engine has made, with their size. Engines of one role that differ run on nodes that do.",
            Query(
                aggregate("count", "pod, num_gpu_blocks, block_size", ENGINES.of("vllm:cache_config_info")),
                "{{pod}}: {{num_gpu_blocks}} blocks of {{block_size}}",
            ),
        ),
    ],
)  # fmt: skip

_PREFIXES = Section(
    "Prefixes",
    [
        graph(
            "Found", SHARE,
            "Prompt tokens that were cached, of all, by engine. All fall: prompts changed, or the cache is too small "
            "for what comes again. One falls: it was restarted.",
            Query(ratio(ENGINES.rate(_FOUND, "pod"), ENGINES.rate(_ASKED, "pod")), "{{pod}}"), highest=1,
            when_empty="no prompts",
        ),
        graph(
            "Looked up and found", TOKENS_PER_SECOND,
            "Prompt tokens. Between the two lies what engines compute: over their prefill speed, that is their load "
            "by prompts.",
            Query(ENGINES.rate(_ASKED), "looked up"), Query(ENGINES.rate(_FOUND), "found"),
        ),
        graph(
            "Expected by routers, and found", SHARE,
            "What routers believed to be cached where they sent prompts, and what was. Expected far above found: "
            "events are lost or late, see below.",
            Query(
                ratio(
                    SERVICE_PODS.rate("kvasir_router_prefix_hit_tokens_total"),
                    SERVICE_PODS.rate("kvasir_router_prompt_tokens_total"),
                ),
                "expected by routers",
            ),
            Query(ratio(SERVICE_PODS.rate(_FOUND), SERVICE_PODS.rate(_ASKED)), "found by engines"), highest=1,
            when_empty="no prompts",
        ),
    ],
)  # fmt: skip

_EVENTS = Section(
    "What routers know of it",
    [
        graph(
            "Events published", EVENTS_PER_SECOND,
            "By engine. None while prompts are computed: it publishes none (--kv-events-config), and routers guess.",
            Query(ENGINES.rate("kvasir_kv_events_published_total", "pod"), "{{pod}}"),
        ),
        graph(
            "Events heard", EVENTS_PER_SECOND,
            "By type, of all routers. BlockRemoved as often as BlockStored: the cache is full and turns over.",
            Query(SERVICE_PODS.rate("kvasir_router_kv_events_total", "type"), "{{type}}"), is_stacked=True,
            when_empty="no KV events",
        ),
        graph(
            "Blocks known", COUNT,
            "Cached blocks of all engines that each router pod knows. Routers that differ for long have lost events.",
            Query(SERVICE_PODS.max("kvasir_router_kv_blocks", "pod"), "{{pod}}"), when_empty="no KV events",
        ),
        graph(
            "Load reports", EVENTS_PER_SECOND,
            "Heard by each router pod, up to 20 a second and engine under load. None: ports 5557 and 5657 are closed "
            "to routers.",
            Query(SERVICE_PODS.rate("kvasir_router_load_reports_total", "pod"), "{{pod}}"), when_empty="no KV events",
        ),
        graph(
            "Gaps", EVENTS_PER_SECOND,
            "Messages found missing, replays asked for, replays that failed, and gaps that stayed: after one of these "
            "the router knows less than there is. Lasting: the network loses connections, or the router lacks CPU.",
            Query(SERVICE_PODS.rate("kvasir_router_kv_event_gaps_total"), "gaps"),
            Query(SERVICE_PODS.rate("kvasir_router_kv_event_replays_total"), "replays"),
            Query(SERVICE_PODS.rate("kvasir_router_kv_event_replays_failed_total"), "replays that failed"),
            Query(SERVICE_PODS.rate("kvasir_router_kv_event_losses_total"), "gaps that stayed"),
            when_empty="no KV events",
        ),
        graph(
            "Not believed", EVENTS_PER_SECOND,
            "Blocks after an unknown one, blocks beyond --kv-index-size (raise it), events of other tiers, and "
            "messages that cannot be read (engine and router of different versions).",
            Query(SERVICE_PODS.rate("kvasir_router_kv_blocks_orphaned_total"), "after an unknown block"),
            Query(SERVICE_PODS.rate("kvasir_router_kv_blocks_refused_total"), "beyond the index"),
            Query(SERVICE_PODS.rate("kvasir_router_kv_events_skipped_total"), "skipped"),
            Query(SERVICE_PODS.rate("kvasir_router_kv_event_messages_malformed_total"), "malformed"),
            when_empty="no KV events",
        ),
    ],
)  # fmt: skip

KV_CACHE = Board(
    "kv-cache", "KV cache and prefixes", "How full caches are, what is found in them, and whether routers know.",
    CHOICES, [_NUMBERS, _ROOM, _PREFIXES, _EVENTS],
)  # fmt: skip
