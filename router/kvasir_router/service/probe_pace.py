"""How many probes of endpoints may begin in a second, of all services together.

A gateway may have thousands of endpoints, all of which are new when it starts. Whoever comes too early waits for its
turn, first come, first served; so intervals stretch where there are more endpoints than the pace allows for.
"""

import asyncio

PROBES_PER_SECOND = 200.0
_BURST_SECONDS = 0.25


class ProbePace:
    def __init__(self, per_second: float = PROBES_PER_SECOND) -> None:
        self._spacing_seconds = 1 / per_second
        self._next_at = 0.0  # of the event loop's clock: when the next one would begin if none could begin early

    async def turn(self) -> None:
        """Returns when a probe may begin."""
        now = asyncio.get_running_loop().time()
        begin = max(self._next_at, now - _BURST_SECONDS)
        self._next_at = begin + self._spacing_seconds
        if begin > now:
            await asyncio.sleep(begin - now)
