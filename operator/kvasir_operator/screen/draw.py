"""A service on one screen, as text of the width that there is. Pure: a snapshot and the time in, text out.

Names and messages are mostly other people's words: a terminal must not obey control characters in them.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from io import StringIO
from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvasir_operator.api.conditions import ConditionType
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.rollout.workload import Workload
from kvasir_operator.screen.read import Snapshot

NUM_EVENTS: Final = 10
UNBOUNDED: Final = 10_000
"""Columns of text that no terminal wraps: one row a line, to be read by programs."""
_GOOD, _BAD, _BUSY = "green", "bold red", "yellow"
_HEALTHY: Final[Mapping[str, str]] = {ConditionType.DEGRADED: "False", ConditionType.PROGRESSING: "False"}
"""The status in which nothing is amiss; True of all others."""
_SECOND, _MINUTE, _HOUR, _DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def draw(snapshot: Snapshot, now: datetime) -> Group:
    """Header, roles, revisions, conditions, decisions of the autoscaler, Events; the newest of each first."""
    status = snapshot.service.get("status", {})
    return Group(
        _header(snapshot, status),
        _section("roles", _roles(status.get("roles", []))),
        _section("revisions", _revisions(snapshot.workloads)),
        _section("conditions", _conditions(status.get("conditions", []), now)),
        _section("scaling", _scaling(status.get("scaling", []), now)),
        _section("events", _events(snapshot.events, now)),
    )


def text_of(snapshot: Snapshot, now: datetime, width: int = UNBOUNDED) -> str:
    """Without colours, and without spaces at the ends of lines."""
    file = StringIO()
    Console(file=file, width=width, force_terminal=False, _environ={}).print(draw(snapshot, now))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _header(snapshot: Snapshot, status: Mapping[str, Any]) -> Table:
    metadata, model = snapshot.service["metadata"], snapshot.service["spec"]["model"]
    names = [model.get("name") or metadata["name"], *model.get("aliases", [])]
    facts = {
        "service": f"{metadata['namespace']}/{metadata['name']}",
        "model": f"{', '.join(names)} ({model['source']})",
        "url": status.get("url", ""),
        "phase": status.get("phase", ""),
        "ready": status.get("ready", ""),
        "spec": _age_of_spec(metadata["generation"], status.get("observedGeneration")),
    }
    table = _grid(2)
    for name, value in facts.items():
        if value:
            table.add_row(_text(name, "bold"), _text(value))
    for note in snapshot.notes:
        table.add_row(_text("note", _BUSY), _text(note))
    return table


def _age_of_spec(generation: int, observed: int | None) -> str:
    if observed is None:
        return f"generation {generation}: no operator has reported yet; does one run, and serve this namespace?"
    if observed < generation:
        return f"generation {generation}; all below is of generation {observed}: the operator has not got to it yet"
    return f"generation {generation}"


def _roles(roles: Iterable[Mapping[str, Any]]) -> Table:
    table = _grid(6, "role", "desired", "ready", "draining", "revision", "waits for")
    for role in roles:
        counts = [str(role[name]) for name in ("desired", "ready", "draining")]
        style = _GOOD if role["ready"] >= role["desired"] else _BUSY
        table.add_row(*_row(role["role"], *counts, role.get("revision", ""), role["message"], style=style))
    return table


def _revisions(workloads: Sequence[Workload]) -> Table:
    """The current one first; `traffic` is a canary's part of the requests."""
    table = _grid(8, "role", "revision", "number", "wanted", "ready", "leaving", "traffic", "trouble")
    for each in sorted(workloads, key=lambda each: (each.key.role, -each.number)):
        traffic = "" if each.traffic_weight is None else f"{each.traffic_weight} %"
        counts = [str(number) for number in (each.number, each.replicas, each.num_ready, each.num_leaving)]
        style = _BAD if each.trouble else ""
        table.add_row(*_row(*each.key, *counts, traffic, each.trouble or "", style=style))
    return table


def _conditions(conditions: Iterable[Mapping[str, Any]], now: datetime) -> Table:
    table = _grid(5, "condition", "status", "reason", "age", "message")
    for each in conditions:
        age = age_text(each.get("lastTransitionTime"), now)
        row = each["type"], each["status"], each["reason"], age, each["message"]
        table.add_row(*_row(*row, style=_style_of(each["type"], each["status"])))
    return table


def _style_of(kind: str, status: str) -> str:
    is_healthy = status == _HEALTHY.get(kind, "True")
    return _GOOD if is_healthy else _BUSY if kind == ConditionType.PROGRESSING else _BAD


def _scaling(decisions: Sequence[Mapping[str, Any]], now: datetime) -> Table:
    table = _grid(5, "age", "role", "replicas", "reason", "message")
    for each in reversed(decisions):
        change = f"{each['from']} to {each['to']}"
        table.add_row(*_row(age_text(each["time"], now), each["role"], change, each["reason"], each["message"]))
    return table


def _events(events: Iterable[KubeObject], now: datetime) -> Table:
    table = _grid(5, "age", "count", "type", "reason", "message")
    for each in sorted(events, key=_reported_at, reverse=True)[:NUM_EVENTS]:
        style = _BUSY if each.get("type") == "Warning" else ""
        counted = str(each.get("count") or 1)
        row = age_text(_reported_at(each), now), counted, each.get("type"), each.get("reason"), each.get("message")
        table.add_row(*_row(*row, style=style))
    return table


def _reported_at(event: KubeObject) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _section(title: str, table: Table) -> Group:
    """Nothing where there is nothing to tell."""
    return Group("", _text(title.upper(), "bold"), table) if table.row_count else Group()


def _grid(num_columns: int, *headers: str) -> Table:
    """All columns but the last are as wide as what is in them, for as long as there is room; the last one wraps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headers), header_style="dim")
    for index in range(num_columns):
        header = headers[index] if headers else ""
        table.add_column(header, no_wrap=index < num_columns - 1, overflow="fold")
    return table


def _row(*cells: str | None, style: str = "") -> list[Text]:
    return [_text(cell or "", style if index < len(cells) - 1 else "") for index, cell in enumerate(cells)]


def _text(words: str, style: str = "") -> Text:
    """On one line, and with nothing that a terminal would take for a command."""
    return Text("".join(each if each.isprintable() else " " for each in words), style=style)


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
