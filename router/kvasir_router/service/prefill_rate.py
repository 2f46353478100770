"""How fast endpoints prefill, fitted online to the times to first token that this router observes.

Model: seconds = overhead + work / rate. Work is tokens, each weighed by what it attends to: one behind
CONTEXT_DOUBLING_TOKENS costs twice as much as the first. An endpoint's fit is recursive least squares (ridge) towards
the median of its fleet; observations lose weight with every further one and with time, so one that was bad is tried
again. No clock is read.
"""

from math import exp2, inf, sqrt
from statistics import median
from weakref import WeakSet

# Linear layers and attention cost the same there: about 30k tokens for a Llama of 8B, 50k for 32B, less as attention
# kernels reach a smaller share of the peak.
CONTEXT_DOUBLING_TOKENS = 32768.0
# Before anybody has observed anything: an 8B model on one recent GPU.
_PRIOR_RATE = 8000.0
_FORGETTING = 0.95  # an observation counts half after 14 more
_HALF_LIFE_SECONDS = 60.0  # or after so long
_PRIOR_OVERHEAD_SECONDS = 0.02
_PRIOR_OVERHEAD_WEIGHT = 25.0  # in observations: the overhead is known better than the rate
_PRIOR_RATE_WEIGHT = 1e5  # in work squared: as one observation of a prompt of 316 tokens
_FLEET_RATE_WEIGHT = 4e6  # of 2,000 tokens, where the fleet is known
_MIN_RATE, _MAX_RATE = 1.0, 1e6
# A wrong guess at what was cached looks like a rate many times off: no observation is taken for more than this.
_LARGEST_SURPRISE = 4.0
_CREDULOUS_WEIGHT = 3.0  # in observations: before that, where the fleet is unknown too, every one is believed
# The newest dispatch in the averages of all; of tokens, as many as all before it weigh.
_DISPATCH_SHARE = 0.02
_DISPATCH_MEMORY_TOKENS = 100_000


# An endpoint's shortest step is remembered for one to two times as long, and is another's by so many times at most.
_STEP_MEMORY_SECONDS = 300.0
_LEAST_SLOWNESS = 1.5
# Reports that tell it: the first comes as a prompt ends, and is of that prompt's steps alone.
_LEAST_REPORTS = 10


_EVIDENCE_HALF_LIFE_SECONDS = 30.0
# Of the growth that the fitted rate expects: from here on, a queue explains more than a fixed time does.
_LEAST_GROWTH = 0.5
# How far from that a growth must be, in standard errors, to show or to refute a queue.
_CERTAINTY = 3.0
# What two times differ by without a reason, before anything is seen: as if of so many comparisons.
_PRIOR_NOISE_SECONDS = 0.005
_PRIOR_WEIGHT = 10.0


class QueueingEvidence:
    """Whether prompts wait for one another: whether an engine's time to first token grows with the prefill ahead.

    An engine may take long and let nobody wait: a fixed time before each first token is no queue. A rate fitted to such
    times explains them as work all the same, and whoever holds requests back for it makes the engine look slower still.

    Only prompts that were there together tell, each compared with the one that ended before it: how much more was ahead
    of it, and how much longer it took. An engine that is slower than it was, and has more to do, need not be slower
    because of that. `is_queueing` is what was shown last: works that are all alike neither show nor refute it.
    """

    __slots__ = ("_ended_at", "_n", "_seconds", "_sum_xx", "_sum_xy", "_sum_yy", "_work", "is_queueing")

    def __init__(self) -> None:
        self._n = self._sum_xx = self._sum_xy = self._sum_yy = 0.0
        self._work = self._seconds = 0.0  # of the last one
        self._ended_at = -inf
        self.is_queueing = False

    def observe(self, work: float, seconds: float, expected_seconds_per_work: float, now: float) -> None:
        since_last = now - self._ended_at
        self._decay(exp2(-max(since_last, 0.0) / _EVIDENCE_HALF_LIFE_SECONDS))
        if seconds > since_last:  # they were there together
            self._compare(work - self._work, seconds - self._seconds)
            self._judge(_LEAST_GROWTH * expected_seconds_per_work)
        self._work, self._seconds, self._ended_at = work, seconds, now

    def _decay(self, factor: float) -> None:
        self._n *= factor
        self._sum_xx *= factor
        self._sum_xy *= factor
        self._sum_yy *= factor

    def _compare(self, more_work: float, longer_seconds: float) -> None:
        self._n += 1
        self._sum_xx += more_work * more_work
        self._sum_xy += more_work * longer_seconds
        self._sum_yy += longer_seconds * longer_seconds

    def _judge(self, least_growth: float) -> None:
        if not self._sum_xx:
            return
        growth = self._sum_xy / self._sum_xx
        unexplained = max(self._sum_yy - growth * self._sum_xy, 0.0)
        noise = (unexplained + _PRIOR_WEIGHT * _PRIOR_NOISE_SECONDS**2) / (self._n + _PRIOR_WEIGHT)
        if abs(growth - least_growth) > _CERTAINTY * sqrt(noise / self._sum_xx):
            self.is_queueing = growth > least_growth


class DecodeStep:
    """What a step of one endpoint takes at least: by its reports of late, from while it only decoded.

    Reports tell a mean of some seconds, and prompts in between make it many times longer. So the least counts, and only
    what is clearly more than the fleet's: such an endpoint decodes slower than the others.
    """

    __slots__ = ("_before", "_least", "_num_reports", "_since")

    def __init__(self) -> None:
        self._least = self._before = inf
        self._num_reports = 0  # since it was unknown
        self._since = -inf

    def observe(self, seconds: float, now: float) -> None:
        self._age(now)
        self._least = min(self._least, seconds)
        self._num_reports += 1

    def least_seconds(self, now: float) -> float:
        """Infinite: it has not decoded for long, or has hardly begun to."""
        self._age(now)
        return min(self._least, self._before) if self._num_reports >= _LEAST_REPORTS else inf

    def _age(self, now: float) -> None:
        age = now - self._since
        if age >= _STEP_MEMORY_SECONDS:
            self._before = self._least if age < 2 * _STEP_MEMORY_SECONDS else inf
            self._least, self._since = inf, now
            if self._before == inf:
                self._num_reports = 0


def work(num_uncached_tokens: int, num_cached_tokens: int = 0) -> float:
    """Prefill of so many tokens behind the cached ones, in tokens as they cost at the beginning of a prompt."""
    return num_uncached_tokens * (1 + (num_cached_tokens + num_uncached_tokens / 2) / CONTEXT_DOUBLING_TOKENS)


class PrefillRate:
    """One endpoint's. `tokens_per_second` is work a second, `overhead_seconds` what a prompt of no tokens takes."""

    __slots__ = (
        "__weakref__", "_fleet", "_n", "_queueing", "_sum_x", "_sum_xx", "_sum_xy", "_sum_y", "_updated_at",
        "decode_slowness", "decode_step", "excess_step_seconds", "num_observations", "overhead_seconds",
        "tokens_per_second",
    )  # fmt: skip

    def __init__(self, fleet: "FleetPrefill") -> None:
        self._fleet = fleet
        self._queueing = QueueingEvidence()
        self.decode_step = DecodeStep()
        self.decode_slowness = 1.0  # of a step, times the fleet's
        self.excess_step_seconds = 0.0  # over the fleet's
        self._n = self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self._updated_at: float | None = None
        self.num_observations = 0
        self.tokens_per_second = fleet.median_rate
        self.overhead_seconds = _PRIOR_OVERHEAD_SECONDS

    @property
    def work_per_token(self) -> float:
        """Of prompts about which only their uncached tokens are known."""
        return self._fleet.work_per_token

    @property
    def work_per_prompt(self) -> float:
        """Of prompts about which only their number is known."""
        return self._fleet.work_per_prompt

    @property
    def has_evidence(self) -> bool:
        """Enough to speak for the fleet: an observation that still counts for something."""
        return self._n >= 0.5

    @property
    def is_queueing(self) -> bool:
        """Prompts were seen to wait for one another, about as long as the rate says."""
        return self.has_evidence and self._queueing.is_queueing

    def observe(self, work: float, seconds: float, now: float) -> None:
        """`work`: ahead at dispatch, the request's own included; `seconds`: until it was done."""
        self._learn(work, seconds, now)
        self._queueing.observe(work, seconds, 1 / self.tokens_per_second, now)

    def observe_at_most(self, work: float, seconds: float, now: float) -> None:
        """An answer that did not tell its first token: it teaches where it came sooner than its prefill should end."""
        if seconds < self.estimate_seconds(work):
            self._learn(work, seconds, now)

    def relax(self, now: float) -> None:
        """To be called now and then: without observations the rate returns to that of the fleet."""
        self._age(now)
        self._solve()

    def compare_steps(self, fleet_seconds: float, now: float) -> None:
        """With the median of the fleet's."""
        seconds = self.decode_step.least_seconds(now)
        is_slow = _LEAST_SLOWNESS * fleet_seconds < seconds < inf
        self.decode_slowness = seconds / fleet_seconds if is_slow else 1.0
        self.excess_step_seconds = seconds - fleet_seconds if is_slow else 0.0

    def estimate_seconds(self, work: float) -> float:
        return self.overhead_seconds + work / self.tokens_per_second

    def note_dispatch(self, num_uncached_tokens: int, work: float) -> None:
        self._fleet.note_dispatch(num_uncached_tokens, work)

    def _learn(self, work: float, seconds: float, now: float) -> None:
        self._age(now)
        if self._n >= _CREDULOUS_WEIGHT or self._fleet.is_known:
            expected = self.estimate_seconds(work)
            seconds = min(max(seconds, expected / _LARGEST_SURPRISE), expected * _LARGEST_SURPRISE)
        self._n = _FORGETTING * self._n + 1
        self._sum_x = _FORGETTING * self._sum_x + work
        self._sum_y = _FORGETTING * self._sum_y + seconds
        self._sum_xx = _FORGETTING * self._sum_xx + work * work
        self._sum_xy = _FORGETTING * self._sum_xy + work * seconds
        self.num_observations += 1
        self._solve()

    def _age(self, now: float) -> None:
        if self._updated_at is not None and now > self._updated_at:
            factor = exp2((self._updated_at - now) / _HALF_LIFE_SECONDS)
            self._n *= factor
            self._sum_x *= factor
            self._sum_y *= factor
            self._sum_xx *= factor
            self._sum_xy *= factor
        self._updated_at = now

    def _solve(self) -> None:
        """The two normal equations, prior included. The prior's weights keep the determinant positive."""
        prior_weight = _FLEET_RATE_WEIGHT if self._fleet.is_known else _PRIOR_RATE_WEIGHT
        a, b, d = self._n + _PRIOR_OVERHEAD_WEIGHT, self._sum_x, self._sum_xx + prior_weight
        e = self._sum_y + _PRIOR_OVERHEAD_WEIGHT * _PRIOR_OVERHEAD_SECONDS
        f = self._sum_xy + prior_weight / self._fleet.median_rate
        determinant = a * d - b * b
        self.overhead_seconds = max((e * d - f * b) / determinant, 0.0)
        slope = max((a * f - b * e) / determinant, 1 / _MAX_RATE)
        self.tokens_per_second = max(1 / slope, _MIN_RATE)


class FleetPrefill:
    """Replicas of one service: what is known of some is expected of a new one, or of one not heard of for a while."""

    def __init__(self, prior_rate: float = _PRIOR_RATE) -> None:
        self._members: WeakSet[PrefillRate] = WeakSet()  # an endpoint that is gone leaves no trace
        self.median_rate = prior_rate
        self.is_known = False
        self.work_per_token = 1.0  # of what was dispatched lately
        self.work_per_prompt = 0.0

    def new_member(self) -> PrefillRate:
        member = PrefillRate(self)
        self._members.add(member)
        return member

    def note_dispatch(self, num_uncached_tokens: int, work: float) -> None:
        """Follows what prompts are like."""
        self.work_per_prompt += _DISPATCH_SHARE * (work - self.work_per_prompt)
        share = num_uncached_tokens / (num_uncached_tokens + _DISPATCH_MEMORY_TOKENS)
        if num_uncached_tokens:
            self.work_per_token += share * (work / num_uncached_tokens - self.work_per_token)

    def refresh(self, now: float) -> None:
        """To be called now and then."""
        rates = [member.tokens_per_second for member in self._members if member.has_evidence]
        self.is_known = len(rates) > 1  # one alone has nobody to be like
        if rates:
            self.median_rate = median(rates)
        steps = [each for member in self._members if (each := member.decode_step.least_seconds(now)) < inf]
        for member in self._members:
            member.relax(now)
            member.compare_steps(median(steps) if steps else inf, now)
