"""How long ago something was, in kubectl's words: the longer ago, the coarser."""

from datetime import datetime, timedelta

_SECOND, _MINUTE, _HOUR, _DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def age_text(then: str | None, now: datetime) -> str:
    """`then` is RFC 3339. `?` where it is not known; 0s where it is yet to come, as by a clock that goes ahead."""
    if not then:
        return "?"
    age = max(now - datetime.fromisoformat(then), timedelta(0))
    days, hours, minutes, seconds = age // _DAY, age % _DAY // _HOUR, age % _HOUR // _MINUTE, age % _MINUTE // _SECOND
    if age < 2 * _MINUTE:
        return f"{age // _SECOND}s"
    if age < 10 * _MINUTE:
        return f"{minutes}m{seconds}s"
    if age < 3 * _HOUR:
        return f"{age // _MINUTE}m"
    if age < 8 * _HOUR:
        return f"{hours}h{minutes}m"
    if age < 2 * _DAY:
        return f"{age // _HOUR}h"
    return f"{days}d{hours}h" if age < 8 * _DAY else f"{days}d"
