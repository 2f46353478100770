"""Prefill and decode apart: which prompts go where, how their KV travels, and whether the two roles fit each other."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import (
    BYTES_PER_SECOND,
    COUNT,
    EVENTS_PER_SECOND,
    PER_SECOND,
    SECONDS,
    SHARE,
    TOKENS,
    Limits,
    Query,
    graph,
    number,
)
from charts.dashboards.promql import ROLE_PODS, SERVICE_PODS, aggregate, some
from charts.dashboards.variables import ENGINES

_REMOTE, _LOCAL = "kvasir_router_remote_prefills_total", "kvasir_router_local_prefills_total"
_ELSEWHERE, _BY_ITSELF = SERVICE_PODS.rate(_REMOTE), SERVICE_PODS.rate(_LOCAL)
_FAILURES = "kvasir_kv_transfer_failures_total"
_TRANSFER, _HANDOVER = "kvasir_kv_transfer_seconds", "kvasir_router_kv_transfer_seconds"
_SPLIT = 'role=~"prefill|decode"'
_NONE = "no transfers"

_NUMBERS = Section(
    "Now",
    [
        number(
            "Prefilled elsewhere", SHARE,
            "Prompts that one engine computed for another, of all of disaggregated services. 0 with prefill engines "
            "ready: see Why not elsewhere.",
            f"{_ELSEWHERE} / ({_ELSEWHERE} + {_BY_ITSELF})", when_empty="no prompts",
        ),
        number(
            "Hand-over, p90", SECONDS,
            "From the end of a remote prefill to the first token of its stream: what splitting costs. More than "
            "prefilling took: raise remotePrefillMinTokens.",
            SERVICE_PODS.quantile(0.9, _HANDOVER), when_empty=_NONE,
        ),
        number(
            "Transfer, p90", SECONDS,
            "From asking for blocks to their last byte, as the engine that receives them measures.",
            ROLE_PODS.quantile(0.9, _TRANSFER), when_empty=_NONE,
        ),
        number(
            "KV received", BYTES_PER_SECOND,
            "Of all chosen engines. Near what the network carries: more prefill engines do not help.",
            ROLE_PODS.rate("kvasir_kv_transfer_bytes_total", "", 'direction="received"'), when_empty=_NONE,
        ),
        number(
            "Failed transfers", PER_SECOND,
            "The decode engine then computes the prompt itself: clients wait longer and see no error. The graph has "
            "the reasons.",
            ROLE_PODS.rate(_FAILURES), Limits(0.01, 0.1), when_empty=_NONE,
        ),
        number(
            "Leased blocks", COUNT,
            "KV blocks that prefill engines keep until they are fetched. Growing without end: nobody fetches, see How "
            "leases end.",
            ROLE_PODS.sum("kvasir_kv_transfer_leased_blocks"), when_empty=_NONE,
        ),
    ],
)  # fmt: skip

_WHERE = Section(
    "Which prompts go where",
    [
        graph(
            "Prefills", PER_SECOND, "Elsewhere, and by the decode engine itself.",
            Query(_ELSEWHERE, "elsewhere"), Query(_BY_ITSELF, "by the decode engine"),
            is_stacked=True,
        ),
        graph(
            "Why not elsewhere", PER_SECOND,
            "`cheaper`: the decode engine has time or most of the prefix. `short`: below remotePrefillMinTokens. "
            "`no_prefill_endpoint`: none is ready or has room, add prefill replicas. `unsupported`: the request asks "
            "for what is not handed over.",
            Query(SERVICE_PODS.rate(_LOCAL, "reason"), "{{reason}}"), is_stacked=True,
        ),
        graph(
            "Prefills elsewhere that failed", PER_SECOND,
            "By reason; the decode engine goes on alone. Lasting: the log of the prefill engines.",
            Query(some(SERVICE_PODS.rate("kvasir_router_remote_prefill_errors_total", "reason")), "{{reason}}"),
            is_stacked=True, when_empty="none so far",
        ),
    ],
)  # fmt: skip

_TRAVEL = Section(
    "How KV travels",
    [
        graph(
            "Bytes", BYTES_PER_SECOND,
            "Sent and received, by engine. What is sent and not received was lost on the way.",
            Query(ROLE_PODS.rate("kvasir_kv_transfer_bytes_total", "pod, direction"), "{{pod}} {{direction}}"),
            when_empty=_NONE,
        ),
        graph(
            "Blocks", EVENTS_PER_SECOND, "The same in KV blocks.",
            Query(ROLE_PODS.rate("kvasir_kv_transfer_blocks_total", "direction"), "{{direction}}"), when_empty=_NONE,
        ),
        graph(
            "Time of a transfer", SECONDS,
            "From asking to the last byte. p99 far above p50: transfers wait for each other, or for prefills that are "
            "not done.",
            Query(ROLE_PODS.quantile(0.5, _TRANSFER), "p50"),
            Query(ROLE_PODS.quantile(0.9, _TRANSFER), "p90"),
            Query(ROLE_PODS.quantile(0.99, _TRANSFER), "p99"), when_empty=_NONE,
        ),
        graph(
            "Time of a hand-over", SECONDS,
            "From the end of a remote prefill to the first token of the stream, as routers see it.",
            Query(SERVICE_PODS.quantile(0.5, _HANDOVER), "p50"),
            Query(SERVICE_PODS.quantile(0.9, _HANDOVER), "p90"), when_empty=_NONE,
        ),
        graph(
            "Failed transfers", PER_SECOND,
            "By reason. `unreachable`, `handshake`: port 5600 between engines, or different versions. `lease`, "
            "`timeout`: too slow, raise lease_seconds or add bandwidth. `checksum`: the network damages data.",
            Query(ROLE_PODS.rate(_FAILURES, "reason"), "{{reason}}"), is_stacked=True, when_empty=_NONE,
        ),
        graph(
            "How leases end", PER_SECOND,
            "`pulled` is as it should be, `declined`: the other had the blocks. `expired`: nobody came, clients went "
            "away or decode engines are overloaded.",
            Query(ROLE_PODS.rate("kvasir_kv_transfer_leases_ended_total", "reason"), "{{reason}}"), is_stacked=True,
            when_empty=_NONE,
        ),
    ],
)  # fmt: skip

_FIT = Section(
    "Whether the roles fit each other",
    [
        graph(
            "Prompt tokens still to compute", TOKENS,
            "By role. Growing for prefill: add prefill replicas. For decode: prompts are prefilled there, see Why not "
            "elsewhere.",
            Query(ROLE_PODS.sum("kvasir_uncached_tokens", "role", _SPLIT), "{{role}}"), when_empty="no split service",
        ),
        graph(
            "Requests", COUNT,
            "By role, running, waiting and held for KV that is on its way. Waiting in decode: add decode replicas.",
            Query(ROLE_PODS.sum("kvasir_num_requests_running", "role", _SPLIT), "{{role}} running"),
            Query(ROLE_PODS.sum("kvasir_num_requests_waiting", "role", _SPLIT), "{{role}} waiting"),
            Query(ROLE_PODS.sum("kvasir_num_requests_held", "role", _SPLIT), "{{role}} held"),
            when_empty="no split service",
        ),
        graph(
            "KV cache in use", SHARE,
            "The mean by role. Decode near 1: add decode replicas. Prefill near 1: leases are kept too long, or add "
            "prefill replicas.",
            Query(aggregate("avg", "role", ROLE_PODS.of("kvasir_kv_cache_usage_ratio", _SPLIT)), "{{role}}"),
            limits=Limits(0.8, 0.95), highest=1, when_empty="no split service",
        ),
        graph(
            "Leased blocks", COUNT,
            "KV blocks that each prefill engine keeps for others. Much of its cache: decode engines fetch too slowly.",
            Query(
                ROLE_PODS.sum("kvasir_kv_transfer_leased_blocks", "pod", 'role="prefill"'), "{{pod}}"
            ), when_empty="no prefill engine",
        ),
        graph(
            "Time to first token", SECONDS,
            "p90 by role; of prefill engines it is the prefill, of decode engines what comes after.",
            Query(ROLE_PODS.quantile(0.9, "kvasir_time_to_first_token_seconds", "role"), "{{role}}"),
            when_empty="no requests",
        ),
        graph(
            "Time between tokens", SECONDS,
            "p90 by role. Decode above what it was unsplit: it prefills too much itself.",
            Query(ROLE_PODS.quantile(0.9, "kvasir_inter_token_latency_seconds", "role"), "{{role}}"),
            when_empty="no requests",
        ),
    ],
)  # fmt: skip

DISAGGREGATION = Board(
    "disaggregation", "Disaggregation", "Prefill and decode apart: what goes where, how KV travels, whether roles fit.",
    ENGINES[:3], [_NUMBERS, _WHERE, _TRAVEL, _FIT],
)  # fmt: skip
