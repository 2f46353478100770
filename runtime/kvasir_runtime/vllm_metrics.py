"""The engine's series under vLLM's names, labels and bounds, so that what was made for vLLM draws and scales as it did.

`engine` is the data-parallel rank; what is counted of requests is of all ranks together, as of engine 0. Panels of what
there is not here (LoRA adapters, KV in files, images) show zero.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric

from kvasir_runtime import request_metrics as counted
from kvasir_runtime.metric_families import Distribution, Families, Keys
from kvasir_runtime.request_metrics import Histogram
from kvasir_runtime.requests.stats import STEP_TOKENS_BOUNDS, SchedulerStats
from kvasir_runtime.shared_rows import SharedRows
from kvasir_runtime.transfer.metrics import SECONDS_BOUNDS, TransferStats

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
