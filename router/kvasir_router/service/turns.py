"""When a router may act for a service whose routers act one after another: by the clock, without asking anybody.

Each has its turn in the order of the names of those that hear one another, and begins nothing in its second half: so
long may what was begun take and their clocks differ, together.
"""

from collections.abc import Collection

TURN_SECONDS = 2.0


def has_turn(own: bytes, peers: Collection[bytes], seconds: float) -> bool:
    """`seconds` since 1970. Without peers it is always this router's."""
    if not peers:
        return True
    order = sorted({own, *peers})
    number, into = divmod(seconds, TURN_SECONDS)
    return order[int(number) % len(order)] == own and into < TURN_SECONDS / 2
