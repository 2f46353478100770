"""The runtime's Prometheus series: their names, what the API processes count, and what one scrape shows.

Names are a public promise (they feed autoscalers, routers and dashboards). What API processes count themselves lies in
shared rows, so that whichever process is scraped shows the sum of all. The engine's own state comes to every process in
SchedulerStats, also when it becomes idle, and is shown as it is. Nothing is decided by what is counted here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.requests.outputs import FinishReason
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.shared_rows import SharedRows
from kvasir_runtime.transfer.commands import FAILURE_REASONS, OFFER_ENDS
from kvasir_runtime.transfer.metrics import SECONDS_BOUNDS, TransferStats

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
# Bounds in seconds: those that vLLM's dashboards know, with finer ones for the token times of small models.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
E2E_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Histogram:
    """Where one histogram lies in a row: a count per bucket (the last is unbounded), then the sum."""

    start: int
    bounds: tuple[float, ...]

    @property
    def sum_slot(self) -> int:
        return self.start + len(self.bounds) + 1

    @property
    def end(self) -> int:
        return self.sum_slot + 1


# The layout of a row.
PROMPT_TOKENS, GENERATION_TOKENS, FINISHED = range(3)
TTFT = Histogram(FINISHED + len(FINISH_REASONS), TTFT_BOUNDS)
ITL = Histogram(TTFT.end, ITL_BOUNDS)
E2E = Histogram(ITL.end, E2E_BOUNDS)
ROW_SLOTS = E2E.end


def request_rows(ipc_dir: Path, api_server_count: int) -> SharedRows:
    return SharedRows(ipc_dir / "request-metrics", api_server_count, ROW_SLOTS)


class RequestMetrics:
    """What one API process counts about its requests. One call costs under a microsecond."""

    def __init__(self, row: "memoryview[float]") -> None:
        self._row = row

    def prompt(self, num_tokens: int) -> None:
        """Of a request that begins, whatever the number of its sequences."""
        self._row[PROMPT_TOKENS] += num_tokens

    def first_token(self, seconds: float) -> None:
        self._observe(TTFT, seconds)

    def next_token(self, seconds: float) -> None:
        self._observe(ITL, seconds)

    def generated(self, num_tokens: int) -> None:
        self._row[GENERATION_TOKENS] += num_tokens

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """After `seconds` from its arrival."""
        self._row[FINISHED + FINISH_REASONS.index(reason)] += 1
        self._observe(E2E, seconds)

    def _observe(self, histogram: Histogram, value: float) -> None:
        self._row[histogram.start + bisect_left(histogram.bounds, value)] += 1
        self._row[histogram.sum_slot] += value


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
    ) -> None:
        self._model_name = model_name
        self._rows = rows
        self._view = view
        self._collectives = collectives

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        if view.stats is not None:
            yield from self._scheduler_series(view.stats)
            yield from self._speculative_series(view.stats)
            if view.stats.transfers is not None:
                yield from self._transfer_series(view.stats.transfers)
        if len(view.stats_by_core) > 1:
            yield from self._data_parallel_series(view.stats_by_core)
        if view.ready is not None:
            yield from self._configuration_series(view.ready)
        if self._collectives is not None:
            yield from self._collective_series(self._collectives)
        yield from self._request_series(view.num_requests_in_flight)

    def _scheduler_series(self, stats: SchedulerStats) -> Iterator[Metric]:
        usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
        gauge, counter = self._gauge, self._counter
        yield gauge("kvasir_num_requests_running", "Requests in the engine's batch.", stats.num_running)
        yield gauge("kvasir_num_requests_waiting", "Requests that wait for a place in the batch.", stats.num_waiting)
        yield gauge("kvasir_num_requests_held", "Requests that wait for more than their turn.", stats.num_held)
        yield gauge("kvasir_kv_cache_usage_ratio", "Share of KV-cache blocks in use, 0 to 1.", usage)
        yield gauge("kvasir_kv_cache_used_tokens", "Room of KV-cache blocks in use.", stats.kv_used_tokens)
        uncached_tokens = stats.waiting_uncached_tokens + stats.running_uncached_tokens
        yield gauge("kvasir_uncached_tokens", "Prompt tokens in the engine still to be computed.", uncached_tokens)
        if stats.prefill_tokens_per_second is not None:
            yield gauge(
                "kvasir_prefill_tokens_per_second",
                "Prompt tokens computed a second, while prompts are.",
                stats.prefill_tokens_per_second,
            )
        yield counter("kvasir_prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_queries)
        yield counter("kvasir_prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hits)
        yield counter("kvasir_engine_steps", "Steps that the engine has finished.", stats.num_steps)
        yield counter(
            "kvasir_kv_events_published", "Events of the KV cache sent to whoever listens.", stats.num_kv_events
        )
        yield gauge(
            "kvasir_engine_last_progress_timestamp_seconds",
            "When the engine finished its last step.",
            stats.last_step_time,
        )
        preemptions = CounterMetricFamily(
            "kvasir_num_preemptions",
            "Requests set back for want of KV blocks, or for those of a better priority.",
            labels=["model_name", "mode"],
        )
        preemptions.add_metric([self._model_name, "recompute"], stats.num_preemptions)
        yield preemptions
        yield gauge("vllm:num_requests_running", "Alias of kvasir_num_requests_running.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Alias of kvasir_num_requests_waiting.", stats.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Alias of kvasir_kv_cache_usage_ratio, 0 to 1.", usage)
        yield counter("vllm:prefix_cache_queries", "Alias of kvasir_prefix_cache_queries.", stats.num_prefix_queries)
        yield counter("vllm:prefix_cache_hits", "Alias of kvasir_prefix_cache_hits.", stats.num_prefix_hits)

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
        yield self._labelled(f"{prefix}_blocks", "KV blocks exchanged.", "direction", by_direction)
        num_bytes = {direction: number * stats.page_bytes for direction, number in by_direction.items()}
        yield self._labelled(f"{prefix}_bytes", "The same in bytes.", "direction", num_bytes)
        failures = dict.fromkeys(FAILURE_REASONS, 0) | stats.num_failures
        yield self._labelled(f"{prefix}_failures", "Pulls that brought less than they should.", "reason", failures)
        ended = dict.fromkeys(OFFER_ENDS, 0) | stats.num_offers_ended
        yield self._labelled(f"{prefix}_leases_ended", "Prompts no longer kept for others.", "reason", ended)
        yield self._gauge(f"{prefix}_leased_blocks", "KV blocks kept for other engines.", stats.num_leased_blocks)
        seconds = HistogramMetricFamily(
            f"{prefix}_seconds", "From asking for blocks to the last byte.", labels=["model_name"]
        )
        counts = stats.seconds_counts or [0] * (len(SECONDS_BOUNDS) + 1)
        bounds = [*(str(bound) for bound in SECONDS_BOUNDS), "+Inf"]
        seconds.add_metric([self._model_name], list(zip(bounds, accumulate(counts), strict=True)), stats.seconds_sum)
        yield seconds

    def _configuration_series(self, ready: EngineReady) -> Iterator[Metric]:
        startup = GaugeMetricFamily(
            "kvasir_engine_startup_seconds", "Seconds of each phase of the start.", labels=["model_name", "phase"]
        )
        for phase, seconds in ready.startup_seconds.items():
            startup.add_metric([self._model_name, phase], seconds)
        yield startup
        yield self._gauge("kvasir_kv_cache_capacity_tokens", "Room of all KV-cache blocks.", ready.kv_capacity_tokens)
        yield self._info(
            "vllm:cache_config_info",
            "The KV cache, as labels.",
            {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)},
        )
        yield self._info(
            "vllm:lora_requests_info",
            "LoRA adapters in use, as labels.",
            {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""},
        )

    def _request_series(self, num_in_flight: int) -> Iterator[Metric]:
        total = self._rows.total
        yield self._gauge("kvasir_http_requests_in_flight", "Requests that are being answered.", num_in_flight)
        yield self._counter("kvasir_prompt_tokens", "Prompt tokens of requests that began.", total(PROMPT_TOKENS))
        yield self._counter("kvasir_generation_tokens", "Tokens generated.", total(GENERATION_TOKENS))
        finished = CounterMetricFamily(
            "kvasir_requests_finished", "Sequences that ended.", labels=["model_name", "finish_reason"]
        )
        for offset, reason in enumerate(FINISH_REASONS):
            finished.add_metric([self._model_name, reason], total(FINISHED + offset))
        yield finished
        yield self._histogram("kvasir_time_to_first_token_seconds", "Arrival to first token.", TTFT)
        yield self._histogram("kvasir_inter_token_latency_seconds", "Time between two tokens of a sequence.", ITL)
        yield self._histogram("kvasir_e2e_request_latency_seconds", "Arrival to the end of a sequence.", E2E)

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

    def _info(self, name: str, text: str, labels: dict[str, str]) -> Metric:
        """A gauge that is always 1, as vLLM exposes it (not an OpenMetrics info)."""
        family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        family.add_metric([self._model_name, *labels.values()], 1)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        counts = [self._rows.total(histogram.start + bucket) for bucket in range(len(histogram.bounds) + 1)]
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        cumulative = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric([self._model_name], cumulative, self._rows.total(histogram.sum_slot))
        return family
