"""How much an endpoint may take on that has just come, or come back: its caches are cold, and idle as it is, it would
draw every request at once. Pure: no clock.
"""

import math
from collections.abc import Sequence

SLOW_START_SECONDS = 10.0


def max_in_flight(seconds_ready: float, in_flight_elsewhere: Sequence[int]) -> int | None:
    """A part of what the others have on average, which grows with time; None: no limit.

    `in_flight_elsewhere`: requests of each endpoint that is no newcomer. Where all are new, somebody must do the work.
    """
    if seconds_ready >= SLOW_START_SECONDS or not in_flight_elsewhere:
        return None
    mean = sum(in_flight_elsewhere) / len(in_flight_elsewhere)
    return 1 + math.floor(mean * max(seconds_ready, 0.0) / SLOW_START_SECONDS)
