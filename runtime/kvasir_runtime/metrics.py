"""The runtime's Prometheus series: what one scrape shows.

Names are a public promise (they feed autoscalers, routers and dashboards). The engine's own state comes to every API
process in SchedulerStats, also when it becomes idle, and is shown as it is; what API processes count themselves is in
`request_metrics`. Most of it is shown twice, under our names and under vLLM's.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import kvasir_runtime
from kvasir_runtime import request_metrics as counted
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.request_metrics import Distribution, Histogram, Keys
from kvasir_runtime.requests.stats import STEP_TOKENS_BOUNDS, SchedulerStats
from kvasir_runtime.shared_rows import SharedRows
from kvasir_runtime.transfer.commands import FAILURE_REASONS, OFFER_ENDS
from kvasir_runtime.transfer.metrics import SECONDS_BOUNDS, TransferStats


class Families:
    """Families of series with labels in common, as prometheus_client's collectors yield them."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        """`labels`: of all series."""
        self._prefix = prefix
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """`values`: one, or one for each `Keys`."""
        return self._filled(GaugeMetricFamily(self._prefix + name, text, labels=[*self._names, *labels]), values)

    def counter(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(self._prefix + name, text, labels=[*self._names, *labels]), values)

    def histogram(
        self, name: str, text: str, values: Distribution | Mapping[Any, Distribution], *labels: str
    ) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        for keys, each in ({(): values} if isinstance(values, Distribution) else values).items():
            family.add_metric([*self._values, *keys], each.cumulative(), each.sum)
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[Any, float]) -> Metric:
        for keys, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric([*self._values, *keys], value)
        return family


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


_Value = Callable[[SchedulerStats], float]
_GAUGES: dict[str, tuple[str, _Value]] = {
    "num_requests_running": ("Requests in the engine's batch.", lambda stats: stats.num_running),
    "num_requests_waiting": (
        "Requests that wait for a place in the batch, or for KV of other engines.",
        lambda stats: stats.num_waiting + stats.num_held,
    ),
    "kv_cache_usage_perc": (
        "Share of KV-cache blocks in use, 0 to 1.",
        lambda stats: stats.num_blocks_used / max(1, stats.num_blocks),
    ),
}
_COUNTERS: dict[str, tuple[str, _Value]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda stats: stats.num_prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.num_prefix_hits),
    "mm_cache_queries": ("Images and the like looked up in a cache: none are taken.", lambda stats: 0),
    "mm_cache_hits": ("Images and the like found in a cache: none are taken.", lambda stats: 0),
    "num_preemptions": ("Requests set back for want of KV blocks.", lambda stats: stats.num_preemptions),
    "spec_decode_num_drafts": ("Times that drafts of a sequence were verified.", lambda stats: stats.num_drafts),
    "spec_decode_num_draft_tokens": ("Draft tokens verified.", lambda stats: stats.num_draft_tokens),
    "spec_decode_num_accepted_tokens": ("Draft tokens that held.", lambda stats: stats.num_accepted_tokens),
}
_LABELLED_GAUGES: dict[str, tuple[str, str, dict[str, _Value]]] = {
    "num_requests_waiting_by_reason": (
        "Requests that wait: for a place in the batch (capacity), or for KV of other engines (deferred).",
        "reason",
        {"capacity": lambda stats: stats.num_waiting, "deferred": lambda stats: stats.num_held},
    ),
    "num_requests_kv_fetch_by_stage": (
        "Requests that wait for KV of other engines, by how far it is.",
        "stage",
        {
            "waiting_to_start": lambda stats: 0,
            "in_progress": lambda stats: stats.num_held,
            "completed_waiting": lambda stats: 0,
        },
    ),
    "engine_sleep_state": (
        "1 for the state that the engine is in: it is always awake.",
        "sleep_state",
        {"awake": lambda stats: 1, "weights_offloaded": lambda stats: 0, "discard_all": lambda stats: 0},
    ),
}
_HISTOGRAMS: dict[str, tuple[str, Histogram]] = {
    "time_to_first_token_seconds": ("From a request's arrival to a sequence's first token.", counted.TTFT),
    "inter_token_latency_seconds": ("Between two tokens of a sequence.", counted.ITL),
    "request_time_per_output_token_seconds": ("Mean time of a sequence's tokens after its first.", counted.TPOT),
    "e2e_request_latency_seconds": ("From a request's arrival to the end of a sequence.", counted.E2E),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", counted.QUEUE),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", counted.PREFILL),
    "request_decode_time_seconds": ("From a sequence's first token to its last.", counted.DECODE),
    "request_prompt_tokens": ("Prompt tokens of a request.", counted.PROMPT),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not cached here.", counted.COMPUTED),
    "request_generation_tokens": ("Tokens generated of a sequence.", counted.GENERATED),
    "request_max_num_generation_tokens": ("Tokens of a request's longest sequence.", counted.MOST_GENERATED),
}


class VllmSeries:
    """The engine's series under vLLM's names, labels and bounds, so that what was made for vLLM draws and scales as it
    did.

    `engine` is the data-parallel rank; what is counted of requests is of all ranks together, as of engine 0. Panels of
    what there is not here (LoRA adapters, KV in files, images) show zero.
    """

    def __init__(self, model_name: str, rows: SharedRows) -> None:
        self._of_model = Families("vllm:", {"model_name": model_name})
        self._of_first = Families("vllm:", {"model_name": model_name, "engine": "0"})
        self._rows = rows

    def of_engines(self, cores: Sequence[SchedulerStats]) -> Iterator[Metric]:
        gauge, counter = self._of_model.gauge, self._of_model.counter
        ranks = [(str(rank), stats) for rank, stats in enumerate(cores)]
        for name, (text, value) in _GAUGES.items():
            yield gauge(name, text, {(rank,): value(stats) for rank, stats in ranks}, "engine")
        for name, (text, value) in _COUNTERS.items():
            yield counter(name, text, {(rank,): value(stats) for rank, stats in ranks}, "engine")
        for name, (text, label, values) in _LABELLED_GAUGES.items():
            by_label = {(rank, key): value(stats) for rank, stats in ranks for key, value in values.items()}
            yield gauge(name, text, by_label, "engine", label)
        by_position = {
            (rank, str(position)): float(number)
            for rank, stats in ranks
            for position, number in enumerate(stats.num_accepted_per_position)
        }
        text = "Draft tokens that held, by their place in the draft, from 0."
        yield counter("spec_decode_num_accepted_tokens_per_pos", text, by_position, "engine", "position")
        steps = {
            (rank,): Distribution(STEP_TOKENS_BOUNDS, stats.step_tokens_counts, stats.step_tokens_sum)
            for rank, stats in ranks
        }
        yield self._of_model.histogram("iteration_tokens_total", "Tokens that a step computes.", steps, "engine")

    def of_requests(self, transfers: TransferStats | None, block_size: int) -> Iterator[Metric]:
        total, counter = self._rows.total, self._of_first.counter
        num_pulled = 0.0 if transfers is None else transfers.num_blocks_received * block_size
        num_cached, num_prompt = total(counted.CACHED_TOKENS), total(counted.PROMPT_TOKENS)
        num_computed = max(0.0, num_prompt - num_cached - num_pulled)
        yield counter("prompt_tokens", "Prompt tokens of requests that began.", num_prompt)
        yield counter("prompt_tokens_cached", "Prompt tokens that were cached here or pulled.", num_cached + num_pulled)
        yield counter("generation_tokens", "Tokens generated.", total(counted.GENERATION_TOKENS))
        for name in ("external_prefix_cache_queries", "external_prefix_cache_hits"):
            yield counter(name, "Prompt tokens whose KV was pulled from other engines.", num_pulled)
        sources: dict[Keys, float] = {
            ("local_compute",): num_computed, ("local_cache_hit",): num_cached, ("external_kv_transfer",): num_pulled,
        }  # fmt: skip
        yield counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", sources, "source")
        tiers: dict[Keys, float] = {
            ("device",): num_cached, ("p2p",): num_pulled,
            **dict.fromkeys([("host",), ("disk",), ("external_unspecified",)], 0.0),
        }  # fmt: skip
        yield counter("prompt_tokens_cached_by_source", "Prompt tokens not computed, by where KV was.", tiers, "source")
        ended = {**counted.finished(self._rows), ("repetition",): 0.0}
        yield counter("request_success", "Sequences that ended.", ended, "finished_reason")
        for name, (text, histogram) in _HISTOGRAMS.items():
            yield self._of_first.histogram(name, text, histogram.read(self._rows))
        if transfers is not None:
            yield from self._of_transfers(transfers)

    def of_cache(self, labels: dict[str, str]) -> Iterator[Metric]:
        gauge = self._of_first.gauge
        yield gauge("cache_config_info", "1, with the KV cache as labels.", {tuple(labels.values()): 1}, *labels)
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        text = "1, with LoRA adapters in use as labels."
        yield gauge("lora_requests_info", text, {tuple(adapters.values()): 1}, *adapters)

    def of_http(self) -> Iterator[Metric]:
        """Under the names of the instrumentation that vLLM uses."""
        http, routes = Families("http_", {}), list(enumerate(counted.HTTP_METHODS.items()))
        answers = {
            (*route, status_class): self._rows.total(counted.status_slot(index, status_class))
            for index, route in routes
            for status_class in counted.STATUS_CLASSES
        }
        yield http.counter("requests", "HTTP requests answered.", answers, "handler", "method", "status")
        seconds = {route: counted.HTTP[index].read(self._rows) for index, route in routes}
        text = "From an HTTP request to the last byte of its answer."
        yield http.histogram("request_duration_seconds", text, seconds, "handler", "method")

    def _of_transfers(self, transfers: TransferStats) -> Iterator[Metric]:
        counter = self._of_first.counter
        failed = sum(transfers.num_failures.values())
        yield counter("nixl_num_failed_transfers", "Pulls of KV blocks that brought less than they should.", failed)
        expired = transfers.num_offers_ended.get("expired", 0)
        yield counter("nixl_num_kv_expired_reqs", "Prompts kept for other engines until time was up.", expired)
        seconds = Distribution(SECONDS_BOUNDS, transfers.seconds_counts, transfers.seconds_sum)
        text = "From asking another engine for KV blocks to the last byte."
        yield self._of_first.histogram("nixl_xfer_time_seconds", text, seconds)


def build_info() -> Metric:
    labels = {"version": kvasir_runtime.__version__, "python": platform.python_version()}
    return Families("kvasir_", labels).gauge("build_info", "1, with the versions of Kvasir and of Python as labels.", 1)
