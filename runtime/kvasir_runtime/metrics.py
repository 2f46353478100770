"""The runtime's Prometheus series: what one scrape shows.

Names are a public promise (they feed autoscalers, routers and dashboards). The engine's own state comes to every API
process in SchedulerStats, also when it becomes idle, and is shown as it is; what API processes count themselves is in
`request_metrics`.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import kvasir_runtime
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.request_metrics import (
    E2E,
    FINISH_REASONS,
    FINISHED,
    GENERATION_TOKENS,
    ITL,
    PROMPT_TOKENS,
    TTFT,
    Histogram,
)
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.shared_rows import SharedRows
from kvasir_runtime.transfer.commands import FAILURE_REASONS, OFFER_ENDS
from kvasir_runtime.transfer.metrics import SECONDS_BOUNDS, TransferStats
from kvasir_runtime.vllm_metrics import VllmSeries, histogram_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What is known of the engine at one scrape; None before it is ready or has made a step."""

    ready: EngineReady | None
    stats: SchedulerStats | None
    """Of all data-parallel ranks together."""
    stats_by_core: Sequence[SchedulerStats] = ()
    """Of each."""
    num_requests_in_flight: int = 0
    """HTTP requests being answered by all API processes."""


class MetricsCollector(Collector):
    """A prometheus_client collector: each scrape reads the engine's last stats and the shared rows."""

    def __init__(
        self,
        model_name: str,
        rows: SharedRows,
        view: Callable[[], EngineView],
        collectives: CollectiveTotals | None = None,
        cache_labels: Mapping[str, str] = {},
    ) -> None:
        """`cache_labels`: how the KV cache is configured."""
        self._model_name = model_name
        self._cache_labels = cache_labels
        self._vllm = VllmSeries(model_name, rows)
        self._rows = rows
        self._view = view
        self._collectives = collectives

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield build_info()
        if view.stats is not None:
            yield from self._scheduler_series(view.stats)
            yield from self._speculative_series(view.stats)
            yield from self._vllm.of_engines(view.stats_by_core or [view.stats])
            if view.stats.transfers is not None:
                yield from self._transfer_series(view.stats.transfers)
        if len(view.stats_by_core) > 1:
            yield from self._data_parallel_series(view.stats_by_core)
        if view.ready is not None:
            yield from self._configuration_series(view.ready)
        if self._collectives is not None:
            yield from self._collective_series(self._collectives)
        yield from self._request_series(view.num_requests_in_flight)
        transfers = None if view.stats is None else view.stats.transfers
        yield from self._vllm.of_requests(transfers, 0 if view.ready is None else view.ready.block_size)
        yield from self._vllm.of_http()

    def _scheduler_series(self, stats: SchedulerStats) -> Iterator[Metric]:
        usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
        gauge, counter = self._gauge, self._counter
        yield gauge("kvasir_num_requests_running", "Requests in the engine's batch.", stats.num_running)
        yield gauge("kvasir_num_requests_waiting", "Requests that wait for a place in the batch.", stats.num_waiting)
        yield gauge(
            "kvasir_num_requests_held",
            "Requests that wait for KV of other engines, or for the prompt that they share.",
            stats.num_held,
        )
        yield gauge("kvasir_kv_cache_usage_ratio", "Share of KV-cache blocks in use, 0 to 1.", usage)
        yield gauge(
            "kvasir_kv_cache_used_tokens", "Tokens that the KV-cache blocks in use have room for.", stats.kv_used_tokens
        )
        uncached_tokens = stats.waiting_uncached_tokens + stats.running_uncached_tokens
        yield gauge("kvasir_uncached_tokens", "Prompt tokens in the engine still to be computed.", uncached_tokens)
        if stats.prefill_tokens_per_second is not None:
            yield gauge(
                "kvasir_prefill_tokens_per_second",
                "Prompt tokens computed a second, in steps that compute many.",
                stats.prefill_tokens_per_second,
            )
        yield counter(
            "kvasir_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield counter("kvasir_prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_hits)
        yield counter("kvasir_engine_steps", "Steps that the engine has finished.", stats.num_steps)
        yield counter("kvasir_kv_events_published", "KV-cache events published.", stats.num_kv_events)
        yield gauge(
            "kvasir_engine_last_progress_timestamp_seconds",
            "When the engine finished its last step, seconds since the epoch.",
            stats.last_step_time,
        )
        preemptions = CounterMetricFamily(
            "kvasir_num_preemptions",
            "Requests set back for want of KV blocks, or for those of a better priority.",
            labels=["model_name", "mode"],
        )
        preemptions.add_metric([self._model_name, "recompute"], stats.num_preemptions)
        yield preemptions

    def _data_parallel_series(self, stats_by_core: Sequence[SchedulerStats]) -> Iterator[Metric]:
        """By rank what says whether they are balanced; all other series are of the ranks together."""
        label = "data_parallel_rank"
        requests = GaugeMetricFamily(
            "kvasir_data_parallel_num_requests",
            "Requests of each data-parallel rank.",
            labels=["model_name", label, "state"],
        )
        usage = GaugeMetricFamily(
            "kvasir_data_parallel_kv_cache_usage_ratio",
            "Share of each data-parallel rank's KV-cache blocks in use, 0 to 1.",
            labels=["model_name", label],
        )
        steps = CounterMetricFamily(
            "kvasir_data_parallel_engine_steps",
            "Steps that each data-parallel rank has finished.",
            labels=["model_name", label],
        )
        for rank, stats in enumerate(stats_by_core):
            steps.add_metric([self._model_name, str(rank)], stats.num_steps)
            requests.add_metric([self._model_name, str(rank), "running"], stats.num_running)
            requests.add_metric([self._model_name, str(rank), "waiting"], stats.num_waiting)
            usage.add_metric([self._model_name, str(rank)], stats.num_blocks_used / max(1, stats.num_blocks))
        yield from (requests, usage, steps)

    def _speculative_series(self, stats: SchedulerStats) -> Iterator[Metric]:
        """Under the names of vLLM's, which also compute acceptance from them."""
        prefix, counter = "kvasir_spec_decode", self._counter
        yield counter(f"{prefix}_num_drafts", "Times that drafts of a sequence were verified.", stats.num_drafts)
        yield counter(f"{prefix}_num_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens)
        yield counter(f"{prefix}_num_accepted_tokens", "Draft tokens that held.", stats.num_accepted_tokens)
        by_position = CounterMetricFamily(
            f"{prefix}_num_accepted_tokens_per_pos",
            "Draft tokens that held, by their place in the draft, from 0.",
            labels=["model_name", "position"],
        )
        for position, num_accepted in enumerate(stats.num_accepted_per_position):
            by_position.add_metric([self._model_name, str(position)], num_accepted)
        yield by_position

    def _collective_series(self, collectives: CollectiveTotals) -> Iterator[Metric]:
        """What ranks told each other, all ranks together."""
        labels = ["model_name", "group", "op"]
        calls = CounterMetricFamily(
            "kvasir_parallel_collectives", "Collectives that ranks took part in.", labels=labels
        )
        sizes = CounterMetricFamily(
            "kvasir_parallel_collective_bytes", "Bytes that ranks handed to collectives.", labels=labels
        )
        for total in collectives.read():
            calls.add_metric([self._model_name, total.group, total.operation], total.calls)
            sizes.add_metric([self._model_name, total.group, total.operation], total.num_bytes)
        yield calls
        yield sizes

    def _transfer_series(self, stats: TransferStats) -> Iterator[Metric]:
        """Of KV exchanged with other engines."""
        by_direction = {"sent": stats.num_blocks_sent, "received": stats.num_blocks_received}
        prefix = "kvasir_kv_transfer"
        yield self._labelled(f"{prefix}_blocks", "KV blocks exchanged with other engines.", "direction", by_direction)
        num_bytes = {direction: number * stats.page_bytes for direction, number in by_direction.items()}
        yield self._labelled(
            f"{prefix}_bytes", "Bytes of the KV blocks exchanged with other engines.", "direction", num_bytes
        )
        failures = dict.fromkeys(FAILURE_REASONS, 0) | stats.num_failures
        yield self._labelled(
            f"{prefix}_failures", "Pulls of KV blocks that brought less than they should.", "reason", failures
        )
        ended = dict.fromkeys(OFFER_ENDS, 0) | stats.num_offers_ended
        yield self._labelled(
            f"{prefix}_leases_ended", "Prompts whose KV blocks are no longer kept for other engines.", "reason", ended
        )
        yield self._gauge(f"{prefix}_leased_blocks", "KV blocks kept for other engines.", stats.num_leased_blocks)
        seconds = HistogramMetricFamily(
            f"{prefix}_seconds", "From asking another engine for KV blocks to the last byte.", labels=["model_name"]
        )
        counts = stats.seconds_counts or [0] * (len(SECONDS_BOUNDS) + 1)
        bounds = [*(str(bound) for bound in SECONDS_BOUNDS), "+Inf"]
        seconds.add_metric([self._model_name], list(zip(bounds, accumulate(counts), strict=True)), stats.seconds_sum)
        yield seconds

    def _configuration_series(self, ready: EngineReady) -> Iterator[Metric]:
        startup = GaugeMetricFamily(
            "kvasir_engine_startup_seconds",
            "Seconds of each phase of the engine's start.",
            labels=["model_name", "phase"],
        )
        for phase, seconds in ready.startup_seconds.items():
            startup.add_metric([self._model_name, phase], seconds)
        yield startup
        yield self._gauge(
            "kvasir_kv_cache_capacity_tokens",
            "Tokens that all KV-cache blocks have room for.",
            ready.kv_capacity_tokens,
        )
        blocks = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        yield from self._vllm.of_cache({**blocks, **self._cache_labels})

    def _request_series(self, num_in_flight: int) -> Iterator[Metric]:
        total = self._rows.total
        yield self._gauge(
            "kvasir_http_requests_in_flight", "HTTP requests being answered that generate.", num_in_flight
        )
        yield self._counter("kvasir_prompt_tokens", "Prompt tokens of requests that began.", total(PROMPT_TOKENS))
        yield self._counter("kvasir_generation_tokens", "Tokens generated.", total(GENERATION_TOKENS))
        finished = CounterMetricFamily(
            "kvasir_requests_finished", "Sequences that ended.", labels=["model_name", "finish_reason"]
        )
        for offset, reason in enumerate(FINISH_REASONS):
            finished.add_metric([self._model_name, reason], total(FINISHED + offset))
        yield finished
        yield self._histogram(
            "kvasir_time_to_first_token_seconds", "From a request's arrival to a sequence's first token.", TTFT
        )
        yield self._histogram("kvasir_inter_token_latency_seconds", "Time between two tokens of a sequence.", ITL)
        yield self._histogram(
            "kvasir_e2e_request_latency_seconds", "From a request's arrival to the end of a sequence.", E2E
        )

    def _labelled(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, number in values.items():
            family.add_metric([self._model_name, value], number)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], *histogram_of(self._rows, histogram))
        return family


def build_info() -> Metric:
    family = GaugeMetricFamily(
        "kvasir_build_info", "1, with the versions of Kvasir and of Python as labels.", labels=["version", "python"]
    )
    family.add_metric([kvasir_runtime.__version__, platform.python_version()], 1)
    return family
