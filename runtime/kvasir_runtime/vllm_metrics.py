"""The engine's series under vLLM's names, labels and bounds, so that what was made for vLLM draws and scales as it did.

`engine` is the data-parallel rank; what is counted of requests is of all ranks together, as of engine 0. Panels of what
there is not here (LoRA adapters, KV in files, images) show zero.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvasir_runtime import request_metrics as counted
from kvasir_runtime.request_metrics import Histogram
from kvasir_runtime.requests.stats import STEP_TOKENS_BOUNDS, SchedulerStats
from kvasir_runtime.shared_rows import SharedRows
from kvasir_runtime.transfer.metrics import SECONDS_BOUNDS, TransferStats

_Value = Callable[[SchedulerStats], float]
_Values = dict[tuple[str, ...], float]
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
    def __init__(self, model_name: str, rows: SharedRows) -> None:
        self._labels = {"model_name": model_name}
        self._rows = rows

    def of_engines(self, cores: Sequence[SchedulerStats]) -> Iterator[Metric]:
        ranks = list(enumerate(cores))
        for name, (text, value) in _GAUGES.items():
            yield self._gauge(name, text, {(str(rank),): value(stats) for rank, stats in ranks})
        for name, (text, value) in _COUNTERS.items():
            yield self._counter(name, text, {(str(rank),): value(stats) for rank, stats in ranks})
        for name, (text, label, values) in _LABELLED_GAUGES.items():
            by_label: _Values = {
                (str(rank), key): value(stats) for rank, stats in ranks for key, value in values.items()
            }
            yield self._gauge(name, text, by_label, label)
        by_position: _Values = {
            (str(rank), str(position)): float(num_accepted)
            for rank, stats in ranks
            for position, num_accepted in enumerate(stats.num_accepted_per_position)
        }
        text = "Draft tokens that held, by their place in the draft, from 0."
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, by_position, "position")
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens that a step computes.", labels=[*self._labels, "engine"]
        )
        for rank, stats in ranks:
            buckets = _cumulative(STEP_TOKENS_BOUNDS, stats.step_tokens_counts)
            steps.add_metric([*self._labels.values(), str(rank)], buckets, stats.step_tokens_sum)
        yield steps

    def of_requests(self, transfers: TransferStats | None, block_size: int) -> Iterator[Metric]:
        total = self._rows.total
        num_pulled = 0 if transfers is None else transfers.num_blocks_received * block_size
        num_cached, num_prompt = total(counted.CACHED_TOKENS), total(counted.PROMPT_TOKENS)
        totals: tuple[tuple[str, str, float], ...] = (
            ("prompt_tokens", "Prompt tokens of requests that began.", num_prompt),
            ("prompt_tokens_cached", "Prompt tokens that were cached here or pulled.", num_cached + num_pulled),
            ("generation_tokens", "Tokens generated.", total(counted.GENERATION_TOKENS)),
            ("external_prefix_cache_queries", "Prompt tokens whose KV was pulled from other engines.", num_pulled),
            ("external_prefix_cache_hits", "Prompt tokens whose KV was pulled from other engines.", num_pulled),
        )
        for name, text, value in totals:
            yield self._counter(name, text, {("0",): value})
        num_computed = max(0.0, num_prompt - num_cached - num_pulled)
        sources = {"local_compute": num_computed, "local_cache_hit": num_cached, "external_kv_transfer": num_pulled}
        tiers = {"device": num_cached, "host": 0, "p2p": num_pulled, "disk": 0, "external_unspecified": 0}
        ended = {str(reason): total(counted.FINISHED + at) for at, reason in enumerate(counted.FINISH_REASONS)}
        labelled: tuple[tuple[str, str, str, dict[str, float]], ...] = (
            ("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source", sources),
            ("prompt_tokens_cached_by_source", "Prompt tokens not computed, by where KV was.", "source", tiers),
            ("request_success", "Sequences that ended.", "finished_reason", {**ended, "repetition": 0}),
        )
        for name, text, label, values in labelled:
            by_label: _Values = {("0", key): value for key, value in values.items()}
            yield self._counter(name, text, by_label, label)
        for name, (text, histogram) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=[*self._labels, "engine"])
            family.add_metric([*self._labels.values(), "0"], *histogram_of(self._rows, histogram))
            yield family
        if transfers is not None:
            yield from self._of_transfers(transfers)

    def of_cache(self, labels: dict[str, str]) -> Iterator[Metric]:
        yield self._info("cache_config_info", "The KV cache, as labels.", labels)
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        yield self._info("lora_requests_info", "LoRA adapters in use, as labels.", adapters)

    def of_http(self) -> Iterator[Metric]:
        """Under the names of the instrumentation that vLLM uses."""
        labels = ["handler", "method"]
        answers = CounterMetricFamily("http_requests", "HTTP requests answered.", labels=[*labels, "status"])
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "From an HTTP request to the last byte of its answer.", labels=labels
        )
        for route, (path, method) in enumerate(counted.HTTP_METHODS.items()):
            for status_class in counted.STATUS_CLASSES:
                number = self._rows.total(counted.status_slot(route, status_class))
                answers.add_metric([path, method, status_class], number)
            seconds.add_metric([path, method], *histogram_of(self._rows, counted.HTTP[route]))
        yield from (answers, seconds)

    def _of_transfers(self, transfers: TransferStats) -> Iterator[Metric]:
        failed = sum(transfers.num_failures.values())
        yield self._counter("nixl_num_failed_transfers", "Pulls that brought less than they should.", {("0",): failed})
        expired = transfers.num_offers_ended.get("expired", 0)
        yield self._counter("nixl_num_kv_expired_reqs", "Prompts kept for others until time was up.", {("0",): expired})
        seconds = HistogramMetricFamily(
            "vllm:nixl_xfer_time_seconds",
            "From asking for KV blocks to the last byte.",
            labels=[*self._labels, "engine"],
        )
        buckets = _cumulative(SECONDS_BOUNDS, transfers.seconds_counts)
        seconds.add_metric([*self._labels.values(), "0"], buckets, transfers.seconds_sum)
        yield seconds

    def _gauge(self, name: str, text: str, values: _Values, *labels: str) -> Metric:
        """`values` by engine and further labels."""
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._labels, "engine", *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _counter(self, name: str, text: str, values: _Values, *labels: str) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, "engine", *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _info(self, name: str, text: str, labels: dict[str, str]) -> Metric:
        """A gauge that is always 1 (not an OpenMetrics info)."""
        return self._gauge(name, text, {("0", *labels.values()): 1}, *labels)


def histogram_of(rows: SharedRows, histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Its cumulative buckets and its sum."""
    counts = [rows.total(histogram.start + bucket) for bucket in range(len(histogram.bounds) + 1)]
    return _cumulative(histogram.bounds, counts), rows.total(histogram.sum_slot)


def _cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Bounds are written as Python's floats, as dashboards quote them."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts or [0] * len(names)), strict=True))
