"""What this request's prefill costs those behind it: nothing where some endpoint is idle, more the longer all are busy.

While every endpoint has a queue, work that is done twice delays everybody until the queues have drained. So the longer
the shortest queue, the more a cached prefix is worth. It is the one term that looks beyond the request itself. Only
what is more than the least counts: the rest is the same wherever it goes.
"""

from collections.abc import Mapping, Sequence

# Seconds of others for each second of own prefill: so many for each second of the shortest queue, up to the most.
DELAY_PER_QUEUE_SECOND = 32.0
MOST_DELAY = 32.0


def seconds(columns: Mapping[str, Sequence[float]]) -> list[float]:
    own, shortest = columns["own_prefill"], min(columns["prefill_queue"])
    if shortest <= 0:
        return [0.0] * len(own)
    weight = min(DELAY_PER_QUEUE_SECOND * shortest, MOST_DELAY)
    least = min(own)
    return [weight * (each - least) for each in own]
