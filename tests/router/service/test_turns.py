"""Who of a service's routers may act at what time."""

import pytest

from kvasir_router.service.peer_feed import TURN_SECONDS, has_turn

NAMES = [b"a", b"b", b"c"]


def having(names: list[bytes], seconds: float) -> list[bytes]:
    return [name for name in names if has_turn(name, set(names) - {name}, seconds)]


def test_a_router_without_peers_has_every_turn() -> None:
    assert all(has_turn(b"a", (), seconds) for seconds in (0.0, 1.9, 2.0, 123.4))


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        (0.0, [b"a"]),
        (TURN_SECONDS / 2 - 0.01, [b"a"]),
        (TURN_SECONDS / 2, []),
        (TURN_SECONDS - 0.01, []),
        (TURN_SECONDS, [b"b"]),
        (2 * TURN_SECONDS, [b"c"]),
        (3 * TURN_SECONDS, [b"a"]),
    ],
)
def test_each_has_its_turn_and_begins_nothing_in_its_second_half(seconds: float, names: list[bytes]) -> None:
    assert having(NAMES, seconds) == names


@pytest.mark.parametrize("skew", [0.0, 0.5, TURN_SECONDS / 2 - 0.01])
def test_two_whose_clocks_differ_by_less_than_half_a_turn_never_act_at_once(skew: float) -> None:
    times = [number * 0.01 for number in range(1000)]
    both = [t for t in times if has_turn(b"a", {b"b"}, t) and has_turn(b"b", {b"a"}, t + skew)]
    assert both == []
