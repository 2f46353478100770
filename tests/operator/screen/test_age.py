"""How long ago something was."""

from datetime import UTC, datetime, timedelta

import pytest

from kvasir_operator.screen.draw import age_text

NOW = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-30, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m0s"),
        (599, "9m59s"),
        (600, "10m"),
        (3 * 3600 - 1, "179m"),
        (3 * 3600, "3h0m"),
        (8 * 3600 - 1, "7h59m"),
        (8 * 3600, "8h"),
        (2 * 86400 - 1, "47h"),
        (2 * 86400, "2d0h"),
        (8 * 86400 - 1, "7d23h"),
        (8 * 86400, "8d"),
        (800 * 86400, "800d"),
    ],
)
def test_the_longer_ago_the_coarser(seconds: int, text: str) -> None:
    assert age_text((NOW - timedelta(seconds=seconds)).isoformat(), NOW) == text


@pytest.mark.parametrize("unknown", [None, ""])
def test_what_is_not_known_is_no_age(unknown: str | None) -> None:
    assert age_text(unknown, NOW) == "?"


def test_the_api_servers_spelling_is_read() -> None:
    assert age_text("2026-11-20T09:59:00Z", NOW) == age_text("2026-11-20T09:59:00.000000Z", NOW) == "60s"
