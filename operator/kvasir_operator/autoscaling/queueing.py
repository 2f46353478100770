"""How many servers keep a wait short: Sakasegawa's approximation (1977) of M/M/c, for fractions of servers too.

More servers behind one router wait less at the same utilisation, so that a large fleet may run hotter than a small one.
"""

import math

_TAIL = 0.1
"""The share of requests that may wait longer: latencies are held at the 90th percentile."""
_MOST_SERVERS = 100_000.0


def wait_p90_seconds(num_servers: float, load: float, mean_seconds: float) -> float:
    """`load`: arrivals per second times `mean_seconds`, the mean service time. Infinite where the queue only grows."""
    utilization = load / num_servers
    if utilization >= 1:
        return math.inf
    delayed = utilization ** (math.sqrt(2 * (num_servers + 1)) - 1)  # share of requests that wait at all
    if delayed <= _TAIL:
        return 0.0
    return mean_seconds / (num_servers * (1 - utilization)) * math.log(delayed / _TAIL)


def num_servers_for(load: float, mean_seconds: float, most_seconds: float) -> float | None:
    """The fewest with which nine of ten wait and are served within `most_seconds`; None where no number suffices."""
    if load <= 0:
        return 0.0
    if mean_seconds >= most_seconds:
        return None
    low, high = load, load + 1
    while wait_p90_seconds(high, load, mean_seconds) + mean_seconds > most_seconds:
        low, high = high, high * 2
        if high > _MOST_SERVERS:
            return None
    while high - low > 0.01:
        middle = (low + high) / 2
        if wait_p90_seconds(middle, load, mean_seconds) + mean_seconds > most_seconds:
            low = middle
        else:
            high = middle
    return high
