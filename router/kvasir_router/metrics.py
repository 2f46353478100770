"""The router's own series, in a registry of its own so that several routers fit in one process."""

from collections.abc import Callable
from functools import cache, partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from kvasir_router.placement.placement import LocalPrefill, Placement
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import EndpointState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FAILURES = ("connect", "lost", "broken", "unresponsive", "timeout", "late")
"""Reasons of failed attempts, besides the status of an answer."""
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each, of when it began


class Metrics:
    """Series with labels are looked up through cached methods: `labels()` costs more than the count itself."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered, refused ones included.", "model", "code")
        self._duration = self._histogram(
            "request_duration_seconds", "Seconds from a request's arrival to the end of its answer.", _SECONDS, "model"
        )
        self._first_byte = self._histogram(
            "time_to_first_byte_seconds", "Seconds from a stream's arrival to its first byte.", _SECONDS, "model"
        )
        self._picks = self._counter(
            "picks", "Requests sent to an engine, by its URL and the policy that chose it.", "endpoint", "policy"
        )
        self._revision_requests = self._counter(
            "revision_requests",
            "Requests sent to an engine, by the revision that answered or was tried last.",
            "revision",
            "code",
        )
        self._revision_errors = self._counter(
            "revision_upstream_errors",
            "Attempts at an engine that failed, by the engine's revision.",
            "revision",
            "reason",
        )
        self._retries = self._counter(
            "retries", "Attempts at an engine that failed and were repeated at another.", "reason"
        )
        self.retries_refused = self._counter(
            "retries_refused", "Attempts that failed and were not repeated: too many were already."
        )
        self._upstream_errors = self._counter("upstream_errors", "Attempts at an engine that failed.", "reason")
        self._streams_resumed = self._counter(
            "streams_resumed", "Streams lost, or moved by an engine with their KV, and continued.", "reason"
        )
        self._queue_wait_seconds = self._histogram(
            "queue_wait_seconds",
            "Seconds that a request was held in the router's queue; those that did not wait are left out.",
            _SECONDS,
        )
        self._overhead_seconds = self._histogram(
            "overhead_seconds",
            "Seconds that the router itself took, from a request's last byte to its dispatch, without the queue.",
            _OVERHEAD_SECONDS,
        )
        self._prefix_hit_tokens = self._counter("prefix_hit_tokens", "Prompt tokens expected to be cached where sent.")
        self._remote_prefills = self._counter(
            "remote_prefills", "Prompts sent to one engine to prefill and to another to decode."
        )
        self._remote_prefill_errors = self._counter(
            "remote_prefill_errors", "Prefills at an engine of their own that failed.", "reason"
        )
        self._local_prefills = self._counter("local_prefills", "Prompts that a decode engine was sent alone.", "reason")
        self.kv_transfer_seconds = self._histogram(
            "kv_transfer_seconds", "Seconds from the end of a remote prefill to a stream's first token.", _SECONDS
        )
        self._prefix_fetches = self._counter(
            "prefix_fetches", "Requests whose engine was told to fetch a prefix that a peer has cached."
        )
        self._prefix_fetch_tokens = self._counter(
            "prefix_fetch_tokens", "Prompt tokens that engines were told to fetch from a peer's cache."
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens sent to engines; exact where prompts are tokenised, else estimated."
        )
        self.in_flight = Gauge(
            "kvasir_router_in_flight", "Requests that the router handles now.", registry=self._registry
        )
        self._request_duration = cache(self._duration.labels)
        self.time_to_first_byte = cache(self._first_byte.labels)
        self._request_count = cache(self._requests.labels)
        self._pick_count = cache(self._picks.labels)
        self.revision_requests = cache(self._requests_of_revision)
        self.revision_errors = cache(self._revision_errors.labels)
        self.retries = cache(self._retries.labels)
        self.upstream_errors = cache(self._upstream_errors.labels)
        self.streams_resumed = cache(self._streams_resumed.labels)
        self._remote_prefill_error_count = cache(self._remote_prefill_errors.labels)
        self._local_prefill_count = cache(self._local_prefills.labels)
        for why in LocalPrefill:
            self._local_prefill_count(why.value)
        # At zero before the first: Prometheus sees no increase in a series that begins with 1.
        for reason in ("broken", "moved", "unresponsive"):
            self.streams_resumed(reason)
        for reason in _FAILURES:
            for count in (self.upstream_errors, self.retries, self._remote_prefill_error_count):
                count(reason)

    def _requests_of_revision(self, revision: str, code: str) -> Counter:
        for reason in _FAILURES:
            self.revision_errors(revision, reason)
        return self._revision_requests.labels(revision, code)

    def count_dispatch(
        self, request: InferenceRequest, placement: Placement, policy: str, own_seconds: float | None
    ) -> None:
        """`own_seconds` None: a stream goes on, and what it took before was its answer."""
        self._pick_count(placement.leg.endpoint.url, policy).inc()
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._prefix_hit_tokens.inc(max(leg.cached_tokens for leg in placement.legs))
        if placement.prefill is not None:
            self._pick_count(placement.prefill.endpoint.url, policy).inc()
            self._remote_prefills.inc()
        elif placement.local_prefill is not None:
            self._local_prefill_count(placement.local_prefill.value).inc()
        if placement.fetch is not None:
            self._prefix_fetches.inc()
            self._prefix_fetch_tokens.inc(placement.fetch.num_tokens)
        if own_seconds is not None:
            self._overhead_seconds.observe(own_seconds)

    def count_remote_prefill_error(self, revision: str, reason: str) -> None:
        self._remote_prefill_error_count(reason).inc()
        self.upstream_errors(reason).inc()
        self.revision_errors(revision, reason).inc()

    def count_end(self, model: str, status: int, seconds: float, queue_wait_seconds: float) -> None:
        self.in_flight.dec()
        self._request_count(model, str(status)).inc()
        self._request_duration(model).observe(seconds)
        if queue_wait_seconds:
            self._queue_wait_seconds.observe(queue_wait_seconds)

    def observe_queue(self, num_waiting: Callable[[], int]) -> None:
        self._gauge("kvasir_router_queue_depth", "Requests held in the router's queue now.", num_waiting)

    def observe_bodies(self, num_bytes: Callable[[], int]) -> None:
        self._gauge(
            "kvasir_router_held_body_bytes", "Bytes of request bodies and of streams' journals held now.", num_bytes
        )

    def observe_connections(self, num_open: Callable[[], int]) -> None:
        self._gauge("kvasir_router_connections", "Connections of clients held now.", num_open)

    def observe_endpoints(self, num_in_state: Callable[[EndpointState], int]) -> None:
        text = "Engines that the router knows, by state."
        gauge = Gauge("kvasir_router_endpoints", text, ["state"], registry=self._registry)
        for state in EndpointState:
            gauge.labels(state.value).set_function(partial(num_in_state, state))

    def observe_ejected(self, num_ejected: Callable[[], int]) -> None:
        self._gauge(
            "kvasir_router_ejected_endpoints",
            "Engines that get few or no requests since they answer with errors.",
            num_ejected,
        )

    def observe_peers(self, num_peers: Callable[[], int]) -> None:
        self._gauge("kvasir_router_peers", "Other routers of the same engines that this one hears.", num_peers)

    def forget_endpoint(self, url: str) -> None:
        """Pods come and go: the series of one that is gone must not stay for ever."""
        self._picks.remove_by_labels({"endpoint": url})
        self._pick_count.cache_clear()

    def forget_revision(self, revision: str) -> None:
        """After a rollout nothing is left of it but its series."""
        for series, children in (
            (self._revision_requests, self.revision_requests),
            (self._revision_errors, self.revision_errors),
        ):
            series.remove_by_labels({"revision": revision})
            children.cache_clear()

    def add(self, collector: Collector) -> None:
        """Series that somebody else counts."""
        self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvasir_router_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, value: Callable[[], int]) -> None:
        Gauge(name, text, registry=self._registry).set_function(value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"kvasir_router_{name}", text, labels, buckets=buckets, registry=self._registry)
