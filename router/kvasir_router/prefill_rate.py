"""Prefill rate of one endpoint, fitted online to the times to first token that this router observes.

Model: seconds = overhead + tokens ahead / rate. Recursive least squares with forgetting and a weak prior (ridge), so
that prompts of one length only, or one early outlier, do not throw the rate off. It reads no clock.
"""

_FORGETTING = 0.95  # an observation counts half after 14 more
_PRIOR_OVERHEAD_SECONDS = 0.02
_PRIOR_OVERHEAD_WEIGHT = 25.0  # in observations: the overhead is known better than the rate
_PRIOR_RATE_WEIGHT = 1e5  # in tokens squared: as one observation of a prompt of 316 tokens
_MIN_RATE, _MAX_RATE = 1.0, 1e6


class PrefillRateFit:
    """`tokens_per_second` starts at the prior and follows the observations."""

    def __init__(self, prior_rate: float) -> None:
        self._prior_slope = 1.0 / prior_rate
        self._n = self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self.num_observations = 0
        self.tokens_per_second = prior_rate
        self.overhead_seconds = _PRIOR_OVERHEAD_SECONDS

    def observe(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens`: uncached tokens ahead at dispatch, the request's own included; `seconds`: to the first byte."""
        self._n = _FORGETTING * self._n + 1
        self._sum_x = _FORGETTING * self._sum_x + num_tokens
        self._sum_y = _FORGETTING * self._sum_y + seconds
        self._sum_xx = _FORGETTING * self._sum_xx + num_tokens * num_tokens
        self._sum_xy = _FORGETTING * self._sum_xy + num_tokens * seconds
        self.num_observations += 1
        self._solve()

    def estimate_seconds(self, num_tokens: int) -> float:
        return self.overhead_seconds + num_tokens / self.tokens_per_second

    def _solve(self) -> None:
        """The two normal equations, prior included. The prior's weights keep the determinant positive."""
        a, b, d = self._n + _PRIOR_OVERHEAD_WEIGHT, self._sum_x, self._sum_xx + _PRIOR_RATE_WEIGHT
        e = self._sum_y + _PRIOR_OVERHEAD_WEIGHT * _PRIOR_OVERHEAD_SECONDS
        f = self._sum_xy + _PRIOR_RATE_WEIGHT * self._prior_slope
        determinant = a * d - b * b
        self.overhead_seconds = max((e * d - f * b) / determinant, 0.0)
        slope = max((a * f - b * e) / determinant, 1 / _MAX_RATE)
        self.tokens_per_second = max(1 / slope, _MIN_RATE)
