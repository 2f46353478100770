"""Texts of the formats that JSON Schema names, as regular expressions of the whole text. Some take a part of what the
format allows, never more: so a leap second is no time."""

from typing import Final

_MONTH_DAY: Final = "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_BY_FOUR: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
DATE: Final = f"(?:(?:[0-9]{{3}}[1-9]|[0-9]{{2}}[1-9]0|[0-9][1-9]00|[1-9]000)-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_LABEL: Final = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
_IPV6: Final = "|".join(
    [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{1,7}}:", f":(?::{_GROUP}){{1,7}}", "::"]
    + [f"(?:{_GROUP}:){{{before}}}(?::{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)]
    + [f"(?:{_GROUP}:){{6}}{_IPV4}", f"::(?:{_GROUP}:){{0,5}}{_IPV4}"]
    + [f"(?:{_GROUP}:){{{before}}}:(?:{_GROUP}:){{0,{5 - before}}}{_IPV4}" for before in range(1, 6)]
)
_SECONDS: Final = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS: Final = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

_POINTER: Final = r"(?:\/(?:[^~\/\x00-\x1f]|~[01])*)*"

_CHAR: Final = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH: Final = rf"(?:\/\/{_HOST}(?::[0-9]{{1,5}})?|{_CHAR}+)(?:\/{_CHAR}*)*"
_BEHIND: Final = rf"(?:{_CHAR}|[\/?])*"

REGEXES: Final = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[tT]{TIME}",
    "duration": f"P(?:{_DAYS}(?:T{_SECONDS})?|T{_SECONDS}|[0-9]+W)",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+){{0,8}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_PATH}(?:\?{_BEHIND})?(?:#{_BEHIND})?",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Of all formats that are checked. Others describe only, as the specification has it for formats that nobody knows."""
PATTERNS: Final = {
    name: f"^(?:{REGEXES[name]})$"
    for name in ("date", "time", "date-time", "ipv6", "json-pointer", "relative-json-pointer")
}
"""Of those that llguidance does not know, or in which it takes more, such as 30 February, or less, such as
`::ffff:192.0.2.1`."""
