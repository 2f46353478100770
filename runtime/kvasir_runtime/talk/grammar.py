"""Grammars of calls in a model's own format: what it is held to where a client asks for a call, or for arguments that
follow their schema.

They begin behind a thought. White space between marks is the model's own choice, within bounds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvasir_chat.open_responses import CUSTOM_INPUT
from kvasir_runtime.errors import GrammarError
from kvasir_runtime.talk.format import CallFormat, Channels, JsonCall, NamedCall, Parameters, Values
from kvasir_runtime.talk.lark import LarkGrammar, escaped_regex, not_having, one_of
from kvasir_runtime.talk.literals import Brackets
from kvasir_runtime.talk.literals_grammar import LiteralsGrammar
from kvasir_runtime.talk.parameters_grammar import ParametersGrammar
from kvasir_runtime.talk.schemas import ArgumentsSchema

ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
_CALL_ID: Final = "/[a-zA-Z0-9]{9}/"
"""Mistral's: no other model writes ids that are not numbers."""
_NUMBER: Final = '":" /[0-9]{1,4}/'
JSON_END: Final = '"}'
_FINAL: Final = "final"
_COMMENTARY: Final = "commentary"


@dataclass(frozen=True, slots=True)
class CallableTool:
    name: str
    parameters: Any
    """JSON Schema; None: any object."""
    is_strict: bool
    """Arguments follow the schema, or there is no grammar. Else they do as far as that can be promised."""
    input_grammar: str | None = None
    """Of the only argument, a text, as it stands in JSON (`structured.json_quoted`); None: the schema says all. Formats
    that write no JSON hold to the schema alone."""


def calls_grammar(
    calls: CallFormat | Channels,
    tools: Sequence[CallableTool],
    *,
    is_required: bool,
    is_parallel: bool,
    special_ids: Mapping[str, int],
) -> str:
    """Of answers that call some of these tools: at once where it is required, else after any text, or not at all.
    `special_ids`: tokens that no text has, by their spelling. What follows it is read by a parser that knows so
    (`is_held`). Raises GrammarError, which names the tool."""
    grammar = LarkGrammar("calls", special_ids)
    if isinstance(calls, Channels):
        return grammar.written(_messages(grammar, calls, tools, is_required=is_required))
    return grammar.written(_CallsGrammar(grammar, calls, is_parallel).rule(tools, is_required=is_required))


class _CallsGrammar:
    def __init__(self, grammar: LarkGrammar, calls: CallFormat, is_parallel: bool) -> None:
        self._grammar = grammar
        self._calls = calls
        self._is_parallel = is_parallel
        needy = [body for body in calls.bodies if isinstance(body, NamedCall) and body.needs]
        fit = [body for body in needy if all(map(grammar.is_special, body.needs))]
        self._body = [*fit, *(body for body in calls.bodies if body not in needy)][0]
        self._is_list = calls.is_list and not fit
        self._section = "" if calls.bare else self._own(calls.section_opened)
        self._opened = self._own(calls.opened)

    def _own(self, marks: Sequence[str]) -> str:
        """That which is a token of the model, of several spellings."""
        return next((mark for mark in marks if self._grammar.is_special(mark)), next(iter(marks), ""))

    def rule(self, tools: Sequence[CallableTool], *, is_required: bool) -> str:
        begun = self._section or self._opened
        calls = self._grammar.rule(self._behind_first_mark(self._grammar.rule(one_of(map(self._tool, tools)))))
        if is_required:
            return f"{self._grammar.text(begun)} {calls}"
        text = self._grammar.text_without(not_having(self._textual_openings()))
        if not begun:
            return f"{calls} | {self._text_that_is_no_bare_call()}"
        others = [mark for mark in self._textual_openings() if mark != begun]
        called = f"{self._grammar.text_until(begun, without=not_having(others))} {calls}"
        return f"({called})* {text}" if self._is_parallel else f"{text} | {called}"

    def _textual_openings(self) -> list[str]:
        return [mark for mark in self._calls.openings if self._grammar.may_be_in_text(mark)]

    def _text_that_is_no_bare_call(self) -> str:
        brackets = escaped_regex(self._calls.bare)
        others = not_having(self._textual_openings())
        return self._grammar.text_without(others, matching=rf"(?:[^{brackets}\s](?s:.*))?")

    def _behind_first_mark(self, body: str) -> str:
        """Calls, from behind the first mark on."""
        space = self._grammar.space()
        closed = self._closing(self._opened, self._calls.opened, self._calls.closed)
        ended = self._closing(self._section, self._calls.section_opened, self._calls.section_closed)
        if self._is_list:
            more = f'("," {space} {body})*' if self._is_parallel else ""
            return f'{space} "[" {body} {more} "]" {closed} {ended}'
        first = f"{space} {body} {closed}"
        call = self._grammar.rule(f"{self._grammar.text(self._opened)} {first}")
        parted = f"{json.dumps(self._calls.between)} {space}" if self._calls.between else space
        more = f"({parted} {call})*" if self._is_parallel else ""
        if not self._section:
            return f"{first} {more}"
        return f"{space} {call} {more} {ended}"

    def _closing(self, opened: str, openings: Sequence[str], closings: Sequence[str]) -> str:
        if not opened or len(openings) != len(closings):
            return ""
        return f"{self._grammar.space()} {self._grammar.text(closings[openings.index(opened)])}"

    def _tool(self, tool: CallableTool) -> str:
        try:
            match self._body:
                case JsonCall(arguments_key=key):
                    begun = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
                    return f'{self._grammar.text(begun)} {_json(self._grammar, tool)} "}}"'
                case NamedCall() as call:
                    return f"{self._header(call, tool.name)} {self._arguments(call, tool)}"
        except GrammarError as error:
            raise GrammarError(f"the tool {tool.name!r}: {error}") from error
        except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
            raise GrammarError(f"the tool {tool.name!r}: a keyword has a value of the wrong kind: {error}") from error

    def _header(self, call: NamedCall, name: str) -> str:
        parts = [self._grammar.text(call.before[0] + name)]
        if call.is_numbered:
            parts.append(_NUMBER)
        if call.id_opened and self._grammar.is_special(call.id_opened[0]):
            parts.append(f"({self._grammar.text(call.id_opened[0])} {_CALL_ID})?")
        return " ".join([*parts, *map(self._grammar.text, call.after[:1])])

    def _arguments(self, call: NamedCall, tool: CallableTool) -> str:
        match call.arguments:
            case Values(within=Brackets() as within) as values:
                schema = ArgumentsSchema(tool.parameters, is_strict=tool.is_strict)
                arguments = LiteralsGrammar(self._grammar, values, schema).rule(within)
            case Values():
                arguments = _json(self._grammar, tool)
            case Parameters() as parameters:
                schema = ArgumentsSchema(tool.parameters, is_strict=tool.is_strict)
                written = ParametersGrammar(self._grammar, parameters, schema).rule()
                arguments = f"{self._grammar.space()} {written}"
        closed = f"{self._grammar.space()} {self._grammar.text(call.closed[0])}" if call.closed else ""
        return f"{arguments} {closed}"


def _json(grammar: LarkGrammar, tool: CallableTool) -> str:
    if tool.input_grammar is not None:
        begun = json.dumps({CUSTOM_INPUT: ""})[:-2]
        return f"{grammar.text(begun)} {grammar.other(tool.input_grammar)} {grammar.text(JSON_END)}"
    schema = tool.parameters
    if schema is None or schema is True:
        schema = ANY_ARGUMENTS
    elif isinstance(schema, Mapping):
        schema = {**ANY_ARGUMENTS, **schema}
    return grammar.json(schema, None if tool.is_strict else ANY_ARGUMENTS)


def _messages(grammar: LarkGrammar, channels: Channels, tools: Sequence[CallableTool], *, is_required: bool) -> str:
    """One call, as a message; text is another."""
    called = one_of(_message_to(grammar, channels, tool) for tool in tools)
    if is_required:
        return called
    message, ended = grammar.text(channels.message), grammar.text(channels.ended[0] + channels.started + "assistant")
    text = grammar.text_without(not_having(list(filter(grammar.may_be_in_text, [*channels.ended, channels.started]))))
    preamble = f"{grammar.text(channels.channel + _COMMENTARY)} {message} {text} {ended}"
    final = f"{grammar.text(channels.channel + _FINAL)} {message} {text}"
    return f"({preamble})* ({called} | {final})"


def _message_to(grammar: LarkGrammar, channels: Channels, tool: CallableTool) -> str:
    header = f"{channels.channel}{_COMMENTARY} to={channels.tool_prefix}{tool.name} {channels.constrained}json"
    try:
        return f"{grammar.text(header + channels.message)} {_json(grammar, tool)}"
    except GrammarError as error:
        raise GrammarError(f"the tool {tool.name!r}: {error}") from error
