"""Formats that a checkpoint describes itself: `response_template` in its tokenizer's configuration, version 1, as
transformers 5.13 and later reads it.

It is written in regular expressions. Those that are texts around named groups become descriptions like ours; what is
said in others is not read.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvasir_runtime.talk.format import CallFormat, JsonCall, NamedCall, Parameters, ReasoningFormat, Values
from kvasir_runtime.talk.literals import JSON, KEYWORDS, OBJECT, PYTHON, Literals

THOUGHT_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
CALLS_FIELD: Final = "tool_calls"
_SPACE: Final = " "
_PIECE: Final = re.compile(
    r"(?P<space>\\s[*+]?)"
    r"|\(\?P<(?P<group>\w+)>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\\\[\]])*\)"
    r"|\\(?P<escaped>[^A-Za-z0-9])"
    r"|(?P<newline>\\n)"
    r"|(?P<plain>[^\\\[\](){}.*+?|^$])"
)
_TAG: Final = re.compile(r"<(\w+)[ =]")


class _NotReadError(Exception):
    """What is said cannot be described in our terms."""


def reasoning_of(response_template: Any) -> ReasoningFormat | None:
    """None: it has none, or none that can be read."""
    for name in THOUGHT_FIELDS:
        field = _field(response_template, name)
        if field is not None:
            opened, closed = _literals(field.get("open")), _literals(field.get("close"))
            return ReasoningFormat(opened, closed) if opened and closed else None
    return None


def calls_of(response_template: Any) -> CallFormat | None:
    """None: it has none, or none that can be read."""
    field = _field(response_template, CALLS_FIELD)
    try:
        return None if field is None else _calls(field)
    except (_NotReadError, TypeError, AttributeError, LookupError):  # the last ones: it is malformed
        return None


def _field(response_template: Any, name: str) -> Mapping[str, Any] | None:
    if not isinstance(response_template, Mapping) or response_template.get("version", 1) != 1:
        return None
    fields = response_template.get("fields")
    field = fields.get(name) if isinstance(fields, Mapping) else None
    return field if isinstance(field, Mapping) else None


def _literals(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(text.strip() for text in given if isinstance(text, str) and text.strip())


def _calls(field: Mapping[str, Any]) -> CallFormat:
    content, arguments = field.get("content", "text"), field.get("content_args") or {}
    closed = _literals(field.get("close")) or _texts(field.get("close_pattern"))
    opened = _literals(field.get("open"))
    if "open_pattern" in field:
        before, group, after = _around(_pieces(field["open_pattern"]))
        opened = tuple(before)
        if group == "name":
            return _named_calls(field, content, arguments, before, after, closed)
    if content == "json" and _function(field) == "{content}":
        return CallFormat((JsonCall(),), opened=opened, closed=closed)
    if content == "python-call-list":
        call = NamedCall(Values(PYTHON, KEYWORDS))
        return CallFormat((call,), opened=opened, closed=closed, is_list=True)
    raise _NotReadError


def _named_calls(
    field: Mapping[str, Any],
    content: str,
    arguments: Mapping[str, Any],
    before: list[str],
    after: list[str],
    closed: tuple[str, ...],
) -> CallFormat:
    function = _function(field)
    if not isinstance(function, Mapping) or function.get("name") != "{name}" or not before:
        raise _NotReadError
    if function.get("arguments") != "{content}":
        raise _NotReadError
    *own_closed, last_closed = closed or ("",)
    tag = _TAG.match(before[-1])
    if not own_closed and tag is not None and len(before) > 1:
        own_closed = [f"</{tag[1]}>"]  # it is skipped, as all that is no parameter
    call = NamedCall(
        _parameters(arguments) if content == "xml-inline" else _values(content, arguments),
        before=(before[-1],),
        after=tuple(after[:1]),
        closed=tuple(own_closed),
    )
    return CallFormat((call,), opened=tuple(before[:-1]), closed=(last_closed,) if last_closed else ())


def _function(field: Mapping[str, Any]) -> Any:
    transform = field.get("transform")
    return transform.get("function") if isinstance(transform, Mapping) else None


def _values(content: str, arguments: Mapping[str, Any]) -> Values:
    delimiters = arguments.get("string_delims", [])
    if content != "json" or any(len(set(each)) != 1 for each in delimiters):
        raise _NotReadError
    if not delimiters and not arguments.get("unquoted_keys"):
        return Values()
    quotes = tuple(each[0] for each in delimiters)
    return Values(Literals(JSON.words, raw_quotes=quotes, has_bare_keys=bool(arguments.get("unquoted_keys"))), OBJECT)


def _parameters(arguments: Mapping[str, Any]) -> Parameters:
    """Of a pattern such as `<parameter=(?P<key>...)>...(?P<value>...)</parameter>`."""
    pieces = _pieces(arguments.get("tag_pattern", ""))
    try:
        key, value = pieces.index(("key",)), pieces.index(("value",))
    except ValueError as error:
        raise _NotReadError from error
    opened, between, closed = pieces[:key], pieces[key + 1 : value], pieces[value + 1 :]
    has_space = _SPACE in between or _SPACE in closed
    marks = [
        [piece for piece in part if isinstance(piece, str) and piece != _SPACE] for part in (opened, between, closed)
    ]
    if any(len(part) not in (1, 2) for part in marks) or len(marks[0]) != 1 or len(marks[2]) != 1:
        raise _NotReadError
    return Parameters(
        (marks[0][0],), (marks[1][0],), (marks[2][0],), value_opened=tuple(marks[1][1:]), has_newlines=has_space
    )


def _around(pieces: list[str | tuple[str]]) -> tuple[list[str], str | None, list[str]]:
    """Texts before and after the only group."""
    groups = [number for number, piece in enumerate(pieces) if isinstance(piece, tuple)]
    if len(groups) > 1:
        raise _NotReadError
    at = groups[0] if groups else len(pieces)
    before, after = pieces[:at], pieces[at + 1 :]
    return _of_text(before), pieces[at][0] if groups else None, _of_text(after)


def _of_text(pieces: list[str | tuple[str]]) -> list[str]:
    return [piece for piece in pieces if isinstance(piece, str) and piece != _SPACE]


def _texts(pattern: Any) -> tuple[str, ...]:
    if pattern is None:
        return ()
    before, group, _ = _around(_pieces(pattern))
    if group is not None:
        raise _NotReadError
    return tuple(before)


def _pieces(pattern: Any) -> list[str | tuple[str]]:
    """Of a regular expression: texts, white space, and groups by their name."""
    pieces: list[str | tuple[str]] = []
    position = 0
    while position < len(pattern):
        found = _PIECE.match(pattern, position)
        if found is None:
            raise _NotReadError
        position = found.end()
        if found["group"] is not None:
            pieces.append((found["group"],))
        elif found["space"] is not None:
            pieces.append(_SPACE)
        else:
            text = found["escaped"] or found["plain"] or "\n"
            joins = bool(pieces) and isinstance(pieces[-1], str) and pieces[-1] != _SPACE
            if joins:
                pieces[-1] += text  # type: ignore[operator]  # it is a text
            else:
                pieces.append(text)
    return pieces
