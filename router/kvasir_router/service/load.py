"""How much one endpoint has to do: the requests there that this router knows of, and what the engine says of itself.

It knows its own, and those that its peers tell of: both are called own here, but for the limit in flight. Engines that
publish their load count every router's requests; this router adds those of its own that the engine has not received
yet. Where none publishes, its own requests are all it has, and what a scrape tells of others'. Prefill is counted in
work (see prefill_rate) and taken to be done in the order of dispatch, so between two pieces of news it is known how far
the first prompt has got.
"""

from dataclasses import dataclass, field
from math import exp2, inf

from kvasir_router.service.load_report import REPORT_LIFETIME_SECONDS, LoadReport
from kvasir_router.service.prefill_rate import PrefillRate, work

# Share of KV in use from which on room is short.
KV_BARRIER_START = 0.8
# Metrics are scraped every second: after so long their last word counts no more.
SCRAPE_LIFETIME_SECONDS = 10.0
# In the tokens sent there of late, a request counts half after so long.
_RECENT_HALF_LIFE_SECONDS = 60.0
# Only whole blocks are handed over: the rest of the prompt, one token at least, is computed where it is decoded.
_MOST_TOKENS_BEHIND_KV = 128


@dataclass(slots=True, eq=False)
class InFlight:
    """One request's part of it, from its dispatch to its end. Clients may choose its id, so others may have it too."""

    request_id: str
    cached_tokens: int
    uncached_tokens: int
    num_output_tokens: int  # expected
    received_tokens: int = 0  # whose KV comes from another endpoint: of all that is not cached, or before the uncached
    is_peers: bool = False  # another router has sent it, and told
    work: float = field(init=False)
    work_ahead: float = field(init=False, default=0.0)  # its own included, at `measured_from`
    measured_from: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.work = work(self.uncached_tokens, self.cached_tokens + self.received_tokens)

    def compute_what_it_should_receive(self) -> None:
        self.uncached_tokens, self.received_tokens = self.received_tokens, 0
        self.work = work(self.uncached_tokens, self.cached_tokens)

    def measure(self, work_ahead: float, now: float) -> None:
        self.work_ahead, self.measured_from = work_ahead, now

    @property
    def new_kv_tokens(self) -> int:
        """KV that it adds at its end: what it finds cached is there already, once for all who share it."""
        return self.uncached_tokens + self.received_tokens + self.num_output_tokens

    @property
    def resident_tokens(self) -> int:
        """KV that its decode steps read, at its end."""
        return self.cached_tokens + self.new_kv_tokens


class EndpointLoad:
    """Only tickets add and remove requests. Times are seconds of one steady clock."""

    __slots__ = (
        "_foreign_work", "_head_started_at", "_num_peers", "_own_kv_tokens", "_own_prefill_tokens", "_own_work",
        "_prefilling", "_receiving", "_recent_at", "_recent_tokens", "_report", "_reported_at", "_scraped_at",
        "_unreported", "kv_capacity_tokens", "kv_room_tokens", "kv_transfer_port", "kv_usage", "kv_used_tokens",
        "last_dispatch", "max_in_flight", "num_decoding", "num_in_flight", "prefill", "prefill_done_at",
        "prefill_rest_seconds", "resident_tokens",
    )  # fmt: skip

    def __init__(self, max_in_flight: int, prefill: PrefillRate) -> None:
        self.max_in_flight = max_in_flight
        self.prefill = prefill
        self.num_in_flight = 0  # without peers'
        self.resident_tokens = 0  # KV that decode steps of own requests will read
        self.last_dispatch = 0  # number of the last request sent there; 0: none yet
        self.kv_usage: float | None = None  # share of KV in use, 0..1, by the engine's last word
        self.kv_capacity_tokens: int | None = None  # None until the engine has told
        self.kv_transfer_port: int | None = None  # rank 0's by its own word; None: it exchanges no cached prefixes
        self.prefill_done_at = 0.0  # when the prefill known of will be done, if all goes as expected
        self.kv_used_tokens = 0.0  # KV that requests hold or will have added at their end
        self.kv_room_tokens = inf  # before room is short; infinite where nothing is known of the cache
        self.num_decoding = 0  # requests past their prefill; where the engine tells, everybody's
        self.prefill_rest_seconds = 0.0  # of it what has not begun: left even if the head is late
        self._num_peers = 0
        self._recent_tokens = self._recent_at = 0.0
        self._prefilling: dict[InFlight, None] = {}  # own, in order of dispatch; the first is the head
        self._receiving: dict[InFlight, None] = {}  # own, whose KV another endpoint computes
        self._own_work = 0.0
        self._own_prefill_tokens = 0
        self._own_kv_tokens = 0
        self._head_started_at = 0.0  # or when the engine has told how much of it is left
        self._unreported: dict[InFlight, None] = {}  # own, sent, but not known to have arrived
        self._report: LoadReport | None = None
        self._reported_at = 0.0
        self._foreign_work = 0.0  # of other routers' requests, by the last scrape
        self._scraped_at: float | None = None

    def queue_seconds(self, now: float) -> float:
        """Until the engine could begin with what is sent there next."""
        return max(self.prefill_done_at - now, self.prefill_rest_seconds)

    @property
    def is_queue_known(self) -> bool:
        """By the engine's own word or because prompts were seen to wait there; not by what engines are like."""
        return self._report is not None or self.prefill.is_queueing

    @property
    def prefill_tokens(self) -> int:
        """Uncached prompt tokens ahead of whatever is sent there next."""
        if self._report is None:
            return self._own_prefill_tokens
        unreported = sum(request.uncached_tokens for request in self._unreported)
        return self._report.waiting_uncached_tokens + self._report.running_uncached_tokens + unreported

    @property
    def is_prefilling(self) -> bool:
        """An own prompt, or by the engine's word somebody's: not what arriving KV leaves to compute."""
        if self._prefilling or self._report is None:
            return bool(self._prefilling)
        reported_tokens = self._report.waiting_uncached_tokens + self._report.running_uncached_tokens
        return reported_tokens > len(self._receiving) * _MOST_TOKENS_BEHIND_KV

    @property
    def num_requests(self) -> int:
        """Everybody's, as far as is known."""
        num_known = self.num_in_flight + self._num_peers
        return (
            num_known if self._report is None else max(num_known, self._report.num_running + self._report.num_waiting)
        )

    def recent_tokens(self, now: float) -> float:
        """Resident tokens of the requests sent there in the last minutes, ended or not."""
        return self._recent_tokens * exp2((self._recent_at - now) / _RECENT_HALF_LIFE_SECONDS)

    def begin(self, request: InFlight, now: float) -> None:
        self._count(request, 1)
        self._recent_tokens, self._recent_at = self.recent_tokens(now) + request.resident_tokens, now
        self.resident_tokens += request.resident_tokens
        self._own_kv_tokens += request.new_kv_tokens
        if not self._is_reported(request):
            self._unreported[request] = None
        if request.received_tokens and not request.uncached_tokens:
            self._receiving[request] = None
            self._foresee()
        else:
            self._begin_prefill(request, now)

    def prefill_after_all(self, request: InFlight, now: float) -> None:
        """The endpoint computes what it should have received from another."""
        request.compute_what_it_should_receive()
        self._receiving.pop(request, None)
        self._begin_prefill(request, now)

    def _begin_prefill(self, request: InFlight, now: float) -> None:
        if not self._prefilling and self._report is None:
            self._head_started_at = now
        self._prefilling[request] = None
        self._own_work += request.work
        self._own_prefill_tokens += request.uncached_tokens
        self.prefill.note_dispatch(request.uncached_tokens, request.work)
        self._foresee()
        request.measure(self.queue_seconds(now) * self.prefill.tokens_per_second, now)

    def end_prefill(self, request: InFlight, now: float | None = None) -> None:
        """May be repeated. `now`: its first token has come at that time; None: it is only taken to be over."""
        self._receiving.pop(request, None)
        self._unreported.pop(request, None)
        if request in self._prefilling:
            if next(iter(self._prefilling)) is request and self._report is None:
                seconds = request.work / self.prefill.tokens_per_second
                self._head_started_at = now if now is not None else self._head_started_at + seconds
            self._forget_prefill(request)
        self._foresee()

    def end(self, request: InFlight) -> None:
        """An engine that is prefilling it stops, and begins with the next."""
        if request in self._prefilling:
            self._forget_prefill(request)
        self._unreported.pop(request, None)
        self._receiving.pop(request, None)
        self._count(request, -1)
        self.resident_tokens -= request.resident_tokens
        self._own_kv_tokens -= request.new_kv_tokens
        self._foresee()

    def report(self, report: LoadReport, now: float) -> None:
        """The engine's own word replaces what was believed; requests that it names are in its figures from now on."""
        self._report, self._reported_at = report, now
        if report.only_decodes:
            self.prefill.decode_step.observe(report.data_parallel_size / report.steps_per_second, now)
        arrived = [request for request in self._unreported if request.request_id in report.arrived]
        for request in arrived:
            del self._unreported[request]
        self.kv_capacity_tokens = report.kv_capacity_tokens or None
        self.kv_transfer_port = report.kv_transfer_port
        self.kv_usage = report.kv_used_tokens / report.kv_capacity_tokens if report.kv_capacity_tokens else None
        self._foreign_work, self._scraped_at = 0.0, None
        self._head_started_at = now
        self._foresee()

    def has_fresh_report(self, now: float) -> bool:
        """The engine has told its load just now. One without work may be silent for longer."""
        return self._report is not None and now - self._reported_at <= REPORT_LIFETIME_SECONDS

    def forget_report(self) -> None:
        """The engine is silent, or another process now."""
        self._report = None
        self.kv_usage = self.kv_transfer_port = None
        self._foresee()

    def scraped(
        self, kv_usage: float | None, kv_capacity_tokens: int | None, num_waiting: int | None, now: float
    ) -> None:
        """From the metrics of an engine that publishes nothing. More waiting than this router has sent are others'."""
        self.kv_usage, self.kv_capacity_tokens = kv_usage, kv_capacity_tokens
        num_own = max(len(self._prefilling) - 1, 0) + len(self._receiving)
        num_foreign = max((num_waiting or 0) - num_own, 0)
        self._foreign_work, self._scraped_at = num_foreign * self.prefill.work_per_prompt, now
        self._foresee()

    def expire(self, now: float) -> None:
        """To be called every second: forgets what has not been said again for too long."""
        if self._report is not None and not self._report.holds(now - self._reported_at):
            self.forget_report()
        if self._scraped_at is not None and now - self._scraped_at > SCRAPE_LIFETIME_SECONDS:
            self.kv_usage, self._foreign_work, self._scraped_at = None, 0.0, None
        self._foresee()

    def _count(self, request: InFlight, change: int) -> None:
        if request.is_peers:
            self._num_peers += change
        else:
            self.num_in_flight += change

    def _is_reported(self, request: InFlight) -> bool:
        """An engine may tell of a peer's request before the peer does."""
        return request.is_peers and self._report is not None and request.request_id in self._report.arrived

    def _forget_prefill(self, request: InFlight) -> None:
        del self._prefilling[request]
        self._unreported.pop(request, None)
        self._own_work = self._own_work - request.work if self._prefilling else 0.0
        self._own_prefill_tokens -= request.uncached_tokens

    def _foresee(self) -> None:
        """Of all work ahead, the head's part began at a known time, and the rest waits for it."""
        rate = self.prefill.tokens_per_second
        self.num_decoding = self.num_in_flight + self._num_peers - len(self._prefilling) - len(self._receiving)
        if self._report is None:
            ahead = self._own_work + self._foreign_work
            head = next(iter(self._prefilling)).work if self._prefilling else 0.0
            self.kv_used_tokens = max(self._own_kv_tokens, (self.kv_usage or 0.0) * (self.kv_capacity_tokens or 0))
        else:
            ahead, head = self._reported_work(self._report)
            new_kv_tokens = sum(request.new_kv_tokens for request in self._unreported)
            self.kv_used_tokens = self._report.kv_used_tokens + new_kv_tokens
            self.num_decoding = max(self.num_decoding, self._report.num_running)
        if self.kv_capacity_tokens is not None:
            self.kv_room_tokens = KV_BARRIER_START * self.kv_capacity_tokens - self.kv_used_tokens
        else:
            self.kv_room_tokens = inf if self.kv_usage is None else 0.0
        self.prefill_done_at = self._head_started_at + ahead / rate if ahead else 0.0
        self.prefill_rest_seconds = (ahead - head) / rate

    def _reported_work(self, report: LoadReport) -> tuple[float, float]:
        """All of it, what the engine has not received included, and that of the prompt which it is prefilling.

        Engines count tokens: what this router knows of its own among them tells their work, and an average the others.
        """
        unreported_work = unreported_tokens = 0.0
        for request in self._unreported:
            unreported_work += request.work
            unreported_tokens += request.uncached_tokens
        reported_tokens = report.waiting_uncached_tokens + report.running_uncached_tokens
        if not reported_tokens:
            return unreported_work, 0.0
        own_tokens, own_work = self._own_prefill_tokens - unreported_tokens, self._own_work - unreported_work
        if reported_tokens < own_tokens:
            reported_work = own_work * reported_tokens / own_tokens
        else:
            reported_work = own_work + (reported_tokens - own_tokens) * self.prefill.work_per_token
        head_work = reported_work * report.running_uncached_tokens / reported_tokens
        return reported_work + unreported_work, head_work
