"""The runtime's Prometheus series: what one scrape shows.

Names are a public promise (they feed autoscalers, routers and dashboards). The engine's own state comes to every API
process in SchedulerStats, also when it becomes idle, and is shown as it is; what API processes count themselves is in
`request_metrics`.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import kvasir_runtime
from kvasir_runtime import request_metrics as counted
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.metric_families import Distribution, Families
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.shared_rows import SharedRows
from kvasir_runtime.transfer.commands import FAILURE_REASONS, OFFER_ENDS
from kvasir_runtime.transfer.metrics import SECONDS_BOUNDS, TransferStats
from kvasir_runtime.vllm_metrics import VllmSeries


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
        self._of = Families("kvasir_", {"model_name": model_name})
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
        gauge, counter = self._of.gauge, self._of.counter
        yield gauge("num_requests_running", "Requests in the engine's batch.", stats.num_running)
        yield gauge("num_requests_waiting", "Requests that wait for a place in the batch.", stats.num_waiting)
        text = "Requests that wait for KV of other engines, or for the prompt that they share."
        yield gauge("num_requests_held", text, stats.num_held)
        usage = stats.num_blocks_used / max(1, stats.num_blocks)
        yield gauge("kv_cache_usage_ratio", "Share of KV-cache blocks in use, 0 to 1.", usage)
        text = "Tokens that the KV-cache blocks in use have room for."
        yield gauge("kv_cache_used_tokens", text, stats.kv_used_tokens)
        uncached_tokens = stats.waiting_uncached_tokens + stats.running_uncached_tokens
        yield gauge("uncached_tokens", "Prompt tokens in the engine still to be computed.", uncached_tokens)
        if stats.prefill_tokens_per_second is not None:
            text = "Prompt tokens computed a second, in steps that compute many."
            yield gauge("prefill_tokens_per_second", text, stats.prefill_tokens_per_second)
        text = "Prompt tokens looked up in the prefix cache."
        yield counter("prefix_cache_queries", text, stats.num_prefix_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_hits)
        yield counter("engine_steps", "Steps that the engine has finished.", stats.num_steps)
        yield counter("kv_events_published", "KV-cache events published.", stats.num_kv_events)
        text = "When the engine finished its last step, seconds since the epoch."
        yield gauge("engine_last_progress_timestamp_seconds", text, stats.last_step_time)
        text = "Requests set back for want of KV blocks, or for those of a better priority."
        yield counter("num_preemptions", text, {("recompute",): stats.num_preemptions}, "mode")

    def _data_parallel_series(self, stats_by_core: Sequence[SchedulerStats]) -> Iterator[Metric]:
        """By rank what says whether they are balanced; all other series are of the ranks together."""
        gauge, label = self._of.gauge, "data_parallel_rank"
        ranks = [(str(rank), stats) for rank, stats in enumerate(stats_by_core)]
        requests = {
            (rank, state): number
            for rank, stats in ranks
            for state, number in (("running", stats.num_running), ("waiting", stats.num_waiting))
        }
        yield gauge("data_parallel_num_requests", "Requests of each data-parallel rank.", requests, label, "state")
        usage = {(rank,): stats.num_blocks_used / max(1, stats.num_blocks) for rank, stats in ranks}
        text = "Share of each data-parallel rank's KV-cache blocks in use, 0 to 1."
        yield gauge("data_parallel_kv_cache_usage_ratio", text, usage, label)
        steps = {(rank,): stats.num_steps for rank, stats in ranks}
        text = "Steps that each data-parallel rank has finished."
        yield self._of.counter("data_parallel_engine_steps", text, steps, label)

    def _speculative_series(self, stats: SchedulerStats) -> Iterator[Metric]:
        prefix, counter = "spec_decode_num", self._of.counter
        yield counter(f"{prefix}_drafts", "Times that drafts of a sequence were verified.", stats.num_drafts)
        yield counter(f"{prefix}_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens)
        yield counter(f"{prefix}_accepted_tokens", "Draft tokens that held.", stats.num_accepted_tokens)
        by_position = {(str(position),): number for position, number in enumerate(stats.num_accepted_per_position)}
        text = "Draft tokens that held, by their place in the draft, from 0."
        yield counter(f"{prefix}_accepted_tokens_per_pos", text, by_position, "position")

    def _collective_series(self, collectives: CollectiveTotals) -> Iterator[Metric]:
        """What ranks told each other, all ranks together."""
        totals = {(total.group, total.operation): total for total in collectives.read()}
        calls = {keys: total.calls for keys, total in totals.items()}
        sizes = {keys: total.num_bytes for keys, total in totals.items()}
        counter, labels = self._of.counter, ("group", "op")
        yield counter("parallel_collectives", "Collectives that ranks took part in.", calls, *labels)
        yield counter("parallel_collective_bytes", "Bytes that ranks handed to collectives.", sizes, *labels)

    def _transfer_series(self, stats: TransferStats) -> Iterator[Metric]:
        """Of KV exchanged with other engines."""
        counter, prefix = self._of.counter, "kv_transfer"
        blocks = {("sent",): stats.num_blocks_sent, ("received",): stats.num_blocks_received}
        yield counter(f"{prefix}_blocks", "KV blocks exchanged with other engines.", blocks, "direction")
        num_bytes = {keys: number * stats.page_bytes for keys, number in blocks.items()}
        text = "Bytes of the KV blocks exchanged with other engines."
        yield counter(f"{prefix}_bytes", text, num_bytes, "direction")
        failures = {(reason,): stats.num_failures.get(reason, 0) for reason in FAILURE_REASONS}
        yield counter(
            f"{prefix}_failures", "Pulls of KV blocks that brought less than they should.", failures, "reason"
        )
        ended = {(reason,): stats.num_offers_ended.get(reason, 0) for reason in OFFER_ENDS}
        text = "Prompts whose KV blocks are no longer kept for other engines."
        yield counter(f"{prefix}_leases_ended", text, ended, "reason")
        text = "KV blocks kept for other engines."
        yield self._of.gauge(f"{prefix}_leased_blocks", text, stats.num_leased_blocks)
        seconds = Distribution(SECONDS_BOUNDS, stats.seconds_counts, stats.seconds_sum)
        text = "From asking another engine for KV blocks to the last byte."
        yield self._of.histogram(f"{prefix}_seconds", text, seconds)

    def _configuration_series(self, ready: EngineReady) -> Iterator[Metric]:
        phases = {(phase,): seconds for phase, seconds in ready.startup_seconds.items()}
        text = "Seconds of each phase of the engine's start."
        yield self._of.gauge("engine_startup_seconds", text, phases, "phase")
        text = "Tokens that all KV-cache blocks have room for."
        yield self._of.gauge("kv_cache_capacity_tokens", text, ready.kv_capacity_tokens)
        blocks = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        yield from self._vllm.of_cache({**blocks, **self._cache_labels})

    def _request_series(self, num_in_flight: int) -> Iterator[Metric]:
        total, counter = self._rows.total, self._of.counter
        text = "HTTP requests being answered that generate."
        yield self._of.gauge("http_requests_in_flight", text, num_in_flight)
        yield counter("prompt_tokens", "Prompt tokens of requests that began.", total(counted.PROMPT_TOKENS))
        yield counter("generation_tokens", "Tokens generated.", total(counted.GENERATION_TOKENS))
        yield counter("requests_finished", "Sequences that ended.", counted.finished(self._rows), "finish_reason")
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to a sequence's first token.", counted.TTFT),
            ("inter_token_latency_seconds", "Time between two tokens of a sequence.", counted.ITL),
            ("e2e_request_latency_seconds", "From a request's arrival to the end of a sequence.", counted.E2E),
        ):
            yield self._of.histogram(name, text, histogram.read(self._rows))


def build_info() -> Metric:
    labels = {"version": kvasir_runtime.__version__, "python": platform.python_version()}
    return Families("kvasir_", labels).gauge("build_info", "1, with the versions of Kvasir and of Python as labels.", 1)
