"""What `format` asks of a text. Days and hours are written as regular expressions of ours: each takes what RFC 3339 and
`jsonschema` with its checkers take, so that February has the days of its year, and a leap second is no time."""

from typing import Final

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"
"""Two digits, a multiple of 4 above 0."""
_DAY: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR}:[0-5][0-9])"

PATTERNS: Final = {
    "date": f"^(?:{_DATE})$",
    "time": f"^(?:{_TIME})$",
    "date-time": f"^(?:{_DATE}[tT]{_TIME})$",
}
FORMATS: Final = frozenset([*PATTERNS, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""That are checked, the others by llguidance. What is not here describes only, as the specification has it for formats
that nobody knows."""
