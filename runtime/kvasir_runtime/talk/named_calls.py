"""Calls whose arguments follow the tool's name."""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvasir_runtime.talk.events import EventWriter
from kvasir_runtime.talk.format import NamedCall, Parameters, Values
from kvasir_runtime.talk.literals import escaped, read_value
from kvasir_runtime.talk.parameters import ANY, TEXT, ParameterValue
from kvasir_runtime.talk.scanner import WHITE_SPACE, Marks, Reading, Scanner, marks_of
from kvasir_runtime.talk.schemas import properties_of, types_of

_NUMBER: Final = re.compile(r"[:0-9]*")
_ID: Final = re.compile(r"[\w\-]*")


class NamedCallReader:
    """Of one call. `ends`: marks that may stand after it, its own beside."""

    def __init__(
        self,
        scanner: Scanner,
        events: EventWriter,
        names: Marks,
        ends: Marks,
        call: NamedCall,
        tools: Mapping[str, Any],
    ) -> None:
        self._scanner = scanner
        self._events = events
        self._names = names
        self._ends = marks_of(*call.closed, *ends.marks)
        self._after_closed = ends
        self._call = call
        self._tools = tools

    def read(self) -> Reading[bool]:
        """Whether it was one; if so, its beginning has been told."""
        before = yield from self._scanner.take_mark(marks_of(*self._call.before))
        if before is None:
            return False
        yield from self._scanner.take_while(WHITE_SPACE)
        name = yield from self._scanner.take_mark(self._names)
        if name is None:
            return False
        call_id = yield from self._read_id(before + name)
        if not (yield from self._is_named()):
            return False
        self._scanner.lift_anchor()
        self._events.begin_call(name, call_id)
        match self._call.arguments:
            case Values() as values:
                is_whole = yield from self._read_value(values)
            case Parameters() as parameters:
                is_whole = yield from self._read_parameters(parameters, self._tools[name])
        if is_whole:
            self._events.end_call()
        return True

    def _read_id(self, header: str) -> Reading[str | None]:
        if self._call.is_numbered:
            number = yield from self._scanner.take_run(_NUMBER)
            return header + number if number else None
        if self._call.id_opened and (yield from self._scanner.take_mark(marks_of(*self._call.id_opened))) is not None:
            return (yield from self._scanner.take_run(_ID)) or None
        return None

    def _is_named(self) -> Reading[bool]:
        """Whether the name ends as it should."""
        after = marks_of(*self._call.after)
        if self._call.after and (yield from self._scanner.take_mark(after)) is None:
            yield from self._scanner.take_while(WHITE_SPACE)
            if (yield from self._scanner.take_mark(after)) is None:
                return False
        yield from self._scanner.take_while(WHITE_SPACE)
        return not self._call.until or (yield from self._scanner.at(marks_of(*self._call.until))) is not None

    # Arguments that are one value.

    def _read_value(self, values: Values) -> Reading[bool]:
        is_absent = (yield from self._scanner.at(self._ends)) is not None or not (yield from self._scanner.char())
        if is_absent:
            if not self._scanner.is_cut:
                self._events.argue("{}")
            return not self._scanner.is_cut
        if (yield from read_value(self._scanner, values.literals, self._events.argue, values.within)):
            return True
        mark = yield from self._scanner.take_until(self._ends, self._events.argue, held=WHITE_SPACE)
        if mark is None:
            self._events.argue((yield from self._scanner.take_while(WHITE_SPACE)))
        return mark is not None

    # Arguments one by one.

    def _read_parameters(self, parameters: Parameters, schema: Any) -> Reading[bool]:
        self._events.argue("{")
        comma = ""
        while True:
            yield from self._scanner.take_while(WHITE_SPACE)
            if (yield from self._scanner.take_mark(marks_of(*parameters.key_opened))) is None:
                break
            if not (yield from self._read_parameter(parameters, schema, comma)):
                return False
            comma = ", "
        if (yield from self._scanner.at(self._ends)) is None and self._scanner.is_cut:
            return False
        self._events.argue("}")
        return True

    def _read_parameter(self, parameters: Parameters, schema: Any, comma: str) -> Reading[bool]:
        """After its first mark. Whether it came to its end."""
        key: list[str] = []
        closed = marks_of(*parameters.key_closed, *parameters.string_key_closed, *parameters.json_key_closed)
        mark = yield from self._scanner.take_until(closed, key.append)
        name = "".join(key).strip()
        self._events.argue(f'{comma}"{escaped(name)}')
        if mark is None:
            return False
        self._events.argue('": ')
        self._scanner.take(len(mark))
        if parameters.value_opened:
            yield from self._scanner.take_while(WHITE_SPACE)
            yield from self._scanner.take_mark(marks_of(*parameters.value_opened))
        value = ParameterValue(_types(parameters, mark, name, schema), self._events.argue)
        value.add("")
        is_whole = yield from self._read_until_closed(parameters, schema, value)
        if is_whole:
            value.end()
        else:
            value.cut()
        return is_whole

    def _read_until_closed(self, parameters: Parameters, schema: Any, value: ParameterValue) -> Reading[bool]:
        held = "\n" if parameters.has_newlines else ""
        if held and (yield from self._scanner.char()) == held:
            self._scanner.take(1)
        closings = marks_of(*parameters.value_closed, *parameters.key_opened, *self._call.closed)
        while True:
            mark = yield from self._scanner.take_until(closings, value.add, held=held)
            if mark is None:
                value.add((yield from self._scanner.take_while(held)) if held else "")
                return False
            self._scanner.set_anchor()
            newlines = (yield from self._scanner.take_while(held)) if held else ""
            is_closed = not value.is_in_string and (yield from self._is_closed(parameters, schema, mark))
            if not is_closed:
                self._scanner.go_to(0)
            self._scanner.lift_anchor()
            if is_closed:
                value.add(newlines[:-1])
                return True
            value.add(self._scanner.take(len(newlines) + len(mark)))

    def _is_closed(self, parameters: Parameters, schema: Any, mark: str) -> Reading[bool]:
        """Whether a mark within a value ends it: what follows tells, since values may have marks in them."""
        start = self._scanner.offset
        self._scanner.take(len(mark))
        if mark in parameters.value_closed:
            yield from self._scanner.take_while(WHITE_SPACE)
            is_end = not (yield from self._scanner.char())
            return is_end or (yield from self._scanner.at(self._after_value(parameters))) is not None
        if mark in parameters.key_opened:  # the end's mark was left out
            is_key = (yield from self._scanner.take_mark(Marks(properties_of(schema)))) is not None
            is_closed = is_key and (yield from self._scanner.at(marks_of(*parameters.key_closed))) is not None
        else:
            yield from self._scanner.take_while(WHITE_SPACE)
            is_end = not (yield from self._scanner.char())
            is_closed = is_end or (yield from self._scanner.at(self._after_closed)) is not None
        self._scanner.go_to(start)
        return is_closed

    def _after_value(self, parameters: Parameters) -> Marks:
        return marks_of(*parameters.key_opened, *self._ends.marks)


def _types(parameters: Parameters, key_closed: str, key: str, schema: Any) -> frozenset[str]:
    if key_closed in parameters.string_key_closed:
        return TEXT
    if key_closed in parameters.json_key_closed:
        return ANY
    return types_of(properties_of(schema).get(key), schema)
