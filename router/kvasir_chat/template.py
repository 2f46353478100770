"""A model's chat template: messages to the very text that the model was trained on.

Templates see what transformers shows them, since they are written against it: the same trimming of blocks, the same
filters, functions and extensions. They run in Jinja's immutable sandbox, because they come with the checkpoint, and no
longer than is good for the others, because a client chooses what they work on.

Whether a role's content is wanted as text or as a list of parts, and where system messages may stand, is found out by
showing the template both. Coding assistants send system messages behind another one, or behind the first turn: where a
template does not print them, those that stand first become one, and a later one becomes a part of the user's turn at
its place, so that conversations still begin alike. Where it refuses a turn of the user's behind another, or behind a
tool's result, they become one.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from kvasir_chat.messages import (
    Arguments,
    ConversationRefusedError,
    Message,
    NoContent,
    UnreadableArguments,
    is_none,
)

MAX_RENDER_SECONDS = 10.0
"""Of a processor. A conversation of a million tokens takes less than one; others wait for what takes longer."""
MAX_RENDERED_CHARS = 2**26
"""More than any context holds. A template may print a variable of the client's with every message."""
MAX_SHOWN_ERROR = 500  # characters of what a template says, which may repeat what the client sent
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_MARK = "\N{SYMBOL FOR UNIT SEPARATOR}kvasir{}\N{SYMBOL FOR UNIT SEPARATOR}"
_END_OF_CONTENT = _MARK.format("-continue")
"""Put behind the content to find where it ends in the prompt; a space behind it shows whether the template trims."""
_ASKS_FOR_SHORT_IDS = "length != 9"
"""Mistral's templates refuse other ids of calls, which other servers gave."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the same, in the order in which transformers looks for it."""
_SYSTEM = ("system", "developer")
_FIRST, _SECOND = _MARK.format("-first"), _MARK.format("-second")


class _TemplateError(ConversationRefusedError):
    """The template itself refuses."""


@dataclass(frozen=True, slots=True)
class _Takes:
    """What is printed of a role's content."""

    parts: bool
    """All of a list's."""
    text: bool


class ChatTemplate:
    """A compiled template and the special tokens (`bos_token`, ...) that it may print. Used by several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *,
        max_chars: int = MAX_RENDERED_CHARS, max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:  # fmt: skip
        """Raises jinja2.TemplateSyntaxError."""
        self.source = source
        self._template = _compiled(source)
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._takes_of_role: dict[str, _Takes] = {}
        self._takes_turns_behind: dict[str, bool] = {}

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        reasoning_effort: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Of messages in OpenAI's shape. With `continue_final_message` the text ends where the last one's content ends;
        else a turn of the model begins, unless `add_generation_prompt` is False. `variables` go before what
        `reasoning_effort` sets.

        Raises ConversationRefusedError; what the template itself refuses, in its own words.
        """
        variables = variables or {}
        if reserved := RESERVED_VARIABLES & variables.keys():
            raise ConversationRefusedError(
                f"chat_template_kwargs may not set {', '.join(sorted(reserved))}; the request's own fields do",
                "chat_template_kwargs",
            )
        seen = self._seen(self._settled(messages))
        asked = {**self._special_tokens, **_of_effort(reasoning_effort), **variables}
        given = {**asked, "tools": tools or None, "documents": documents or None}
        try:
            return self._conversation_text(seen, add_generation_prompt, given, continues=continue_final_message)
        except _TemplateError:
            completed = [_completed(tool) for tool in tools or ()]
            if completed == [*(tools or ())]:
                raise
        given["tools"] = completed
        return self._conversation_text(seen, add_generation_prompt, given, continues=continue_final_message)

    def _conversation_text(
        self, seen: list[Message], add_generation_prompt: bool | None, given: Mapping[str, Any], *, continues: bool
    ) -> str:
        if not continues:
            return self._text(seen, add_generation_prompt is not False, given)
        text, mark, rest = self._text([*seen[:-1], _marked(seen[-1])], False, given).rpartition(_END_OF_CONTENT)
        if not mark:
            raise ConversationRefusedError(
                "the model's chat template does not print the last message's content, so it cannot be continued; "
                "send the request without continue_final_message",
                "continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def _seen(self, messages: Sequence[Any]) -> list[Message]:
        seen = [_template_message(each, index, self._seen_role, self._shaped) for index, each in enumerate(messages)]
        if _ASKS_FOR_SHORT_IDS in self.source:
            for message in seen:
                _shorten_ids(message)
        return seen

    def _seen_role(self, role: str) -> str:
        """OpenAI renamed `system`; most templates know the old name, and some speak of developers otherwise."""
        return "system" if role == "developer" and not self._knows_developers else role

    @cached_property
    def _knows_developers(self) -> bool:
        return "developer" in self.source and any(
            self._prints("developer", content) for content in (_FIRST, [_part(_FIRST)])
        )

    def _settled(self, messages: Sequence[Any]) -> Sequence[Any]:
        """With system messages where the template takes them, and turns of the user as it takes those."""
        messages = self._with_settled_systems(messages)
        for role in ("user", "tool"):
            if _has_turns(messages, role, "user") and not self._takes_turns(role):
                messages = _joined_turns(messages, role, "user")
        return messages

    def _with_settled_systems(self, messages: Sequence[Any]) -> Sequence[Any]:
        if not any(map(_is_system, messages[1:])):
            return messages
        count = _num_leading(messages)
        if count > 1 and not self._takes_several_systems:
            messages, count = _gathered(messages, count), 1
        if any(map(_is_system, messages[count:])) and not self._takes_later_systems:
            return _as_users(messages, count)
        return messages

    @cached_property
    def _takes_several_systems(self) -> bool:
        first, second = ({"role": "system", "content": text} for text in (_FIRST, _SECOND))
        return self._prints_both([first, second, {"role": "user", "content": "hello"}])

    @cached_property
    def _takes_later_systems(self) -> bool:
        talk = (("user", _FIRST), ("assistant", "hello"), ("system", _SECOND), ("user", "hello"))
        return self._prints_both([{"role": role, "content": text} for role, text in talk])

    def _takes_turns(self, role: str) -> bool:
        """Whether a turn of the user's behind one of this role is not what it refuses."""
        if role not in self._takes_turns_behind:
            talk = _conversation(role, "hello")
            turn = {"role": "user", "content": "hello"}
            self._takes_turns_behind[role] = self._takes_talk([*talk, turn]) or not self._takes_talk(talk)
        return self._takes_turns_behind[role]

    def _takes_talk(self, messages: Sequence[Message]) -> bool:
        try:
            self._text(self._seen(messages), True, self._special_tokens)
        except ConversationRefusedError:
            return False
        return True

    def _prints_both(self, messages: Sequence[Message]) -> bool:
        try:
            text = self._text(self._seen(messages), True, self._special_tokens)
        except ConversationRefusedError:
            return False
        return _FIRST in text and _SECOND in text

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool, given: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars, end = 0, time.thread_time() + self._max_seconds
        try:
            asked = {"messages": messages, "add_generation_prompt": add_generation_prompt}
            context = {"tools": None, "documents": None, **asked, **given}
            for part in self._template.generate(context):
                parts.append(part)
                num_chars += len(part)
                if num_chars > self._max_chars or time.thread_time() > end:
                    break
            else:
                return "".join(parts)
        except Exception as error:  # a program of the model's maker on a client's values: anything may be wrong
            message = f"the model's chat template refuses these messages: {str(error)[:MAX_SHOWN_ERROR]}"
            raise _TemplateError(message, "messages") from error
        raise ConversationRefusedError(
            f"the model's chat template made {num_chars} characters of these messages and was not at their end, but at "
            f"most {self._max_chars} in {self._max_seconds:g} seconds are made of a request; send fewer messages, "
            "or less in chat_template_kwargs and tool_calls",
            "messages",
        )

    def _shaped(self, role: str, content: str | list[Message]) -> str | list[Message]:
        takes = self._takes(role)
        if isinstance(content, list):
            if takes.parts:
                return content
            content = _joined_parts(content)
        return content if takes.text else [_part(content)]

    def _takes(self, role: str) -> _Takes:
        """Of a role that the template refuses in any shape: what it takes of users."""
        known = self._takes_of_role.get(role)
        if known is None:
            parts, text = self._prints(role, [_part(_FIRST), _part(_SECOND)]), self._prints(role, _FIRST)
            if parts is text is None and role != "user":
                known = self._takes("user")
            else:
                known = _Takes(bool(parts), bool(text) or not self._prints(role, [_part(_FIRST)]))
            self._takes_of_role[role] = known
        return known

    def _prints(self, role: str, content: str | list[Message]) -> bool | None:
        """Whether all of it, and not as Python's or JSON's spelling of a list; None: it is refused, behind a system
        message too.
        """
        conversation = _conversation(role, content)
        for messages in (conversation, [{"role": "system", "content": "hello"}, *conversation]):
            try:
                text = self._text(messages, True, self._special_tokens)
            except ConversationRefusedError:
                continue
            is_quoted = f'"{_FIRST}' in text or f"'{_FIRST}" in text
            return _FIRST in text and (_SECOND in text or _SECOND not in str(content)) and not is_quoted
        return None


def _template_message(
    message: Any,
    index: int,
    seen_role: Callable[[str], str],
    shaped: Callable[[str, str | list[Message]], str | list[Message]],
) -> Message:
    """`seen_role`, `shaped`: a role and its content as the template takes them. Raises ConversationRefusedError."""
    field = f"messages[{index}]"
    if not isinstance(message, dict) or (role := message.get("role")) not in _ROLES:
        raise ConversationRefusedError(f"{field}: it is no message with one of the roles {', '.join(_ROLES)}", field)
    role = seen_role(role)
    content = _content(message.get("content"), f"{field}.content")
    if content is None and role != "assistant":
        raise ConversationRefusedError(
            f"{field}.content: a message of the role {message['role']!r} needs content", f"{field}.content"
        )
    seen: Message = {"role": role, "content": NoContent() if content is None else shaped(role, content)}
    seen |= {key: value for key in ("name", "tool_call_id") if (value := message.get(key)) is not None}
    reasoning = next((value for key in _REASONING if (value := message.get(key)) is not None), None)
    if reasoning is not None:
        seen |= dict.fromkeys(_REASONING, reasoning)
    if calls := message.get("tool_calls"):
        seen["tool_calls"] = [_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return seen


def _completed(tool: Any) -> Any:
    """With what OpenAI's clients may leave out of a tool and some templates print unasked."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    parameters = function.get("parameters")
    if isinstance(parameters, dict | None):
        parameters = {"type": "object", "properties": {}} | (parameters or {})
    described = {"description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": {**function, **described}}


def _shorten_ids(message: Message) -> None:
    """Of calls, to nine letters and digits, those of a call and of its result alike."""
    for owner, key in [(message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls", ()))]:
        if isinstance(owner, dict) and isinstance(call_id := owner.get(key), str) and not _SHORT_ID.fullmatch(call_id):
            owner[key] = hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _joined_parts(parts: Sequence[Message]) -> str:
    return "\n".join(part["text"] for part in parts)


def _content(content: Any, field: str) -> str | list[Message] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_is_text, content)):
        return [{"type": "text", "text": part["text"]} for part in content]
    raise ConversationRefusedError(f"{field}: it is neither text nor a list of parts of text", field)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _call(call: Any, field: str) -> Message:
    """OpenAI sends a call's arguments as JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationRefusedError(f"{field}: a call has a function, an object with a name and arguments", field)
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": _arguments(text)}}


def _arguments(text: str) -> Arguments | UnreadableArguments:
    try:
        return Arguments(msgspec.json.decode(text, type=dict[str, Any]), text)
    except (msgspec.DecodeError, RecursionError):
        return UnreadableArguments(text)


def _num_leading(messages: Sequence[Any]) -> int:
    return next((index for index, each in enumerate(messages) if not _is_system(each)), len(messages))


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in _SYSTEM


def _gathered(messages: Sequence[Any], count: int) -> list[Any]:
    """The first `count` as one."""
    parts = [part for message in messages[:count] for part in _parts_of(message)]
    return [{**messages[0], "content": parts}, *messages[count:]]


def _as_users(messages: Sequence[Any], start: int) -> list[Any]:
    """Those from `start` on in the user's turns; turns of the user that follow each other then are one."""
    later = [{**message, "role": "user"} if _is_system(message) else message for message in messages[start:]]
    return [*messages[:start], *_joined_turns(later, "user", "user")]


def _joined_turns(messages: Sequence[Any], role: str, next_role: str) -> list[Any]:
    """What the second role says behind the first becomes parts of the first one's turn."""
    made: list[Any] = []
    for message in messages:
        if made and _has_turns([made[-1], message], role, next_role):
            made[-1] = {**made[-1], "content": [*_parts_of(made[-1]), *_parts_of(message)]}
        else:
            made.append(message)
    return made


def _has_turns(messages: Sequence[Any], role: str, next_role: str) -> bool:
    """Whether a message of the second role stands right behind one of the first."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    return (role, next_role) in pairwise(roles)


def _parts_of(message: Message) -> list[Any]:
    content: Any = message.get("content")
    return content if isinstance(content, list) else [_part(content)]


def _of_effort(effort: str | None) -> dict[str, Any]:
    """Templates know the effort, or a switch under one of two names."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **dict.fromkeys(("enable_thinking", "thinking"), effort != "none")}


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


def _conversation(role: str, content: str | list[Message]) -> list[Message]:
    """One that templates accept, with such a message."""
    user, message = {"role": "user", "content": "hello"}, {"role": role, "content": content}
    match role:
        case "user":
            return [message]
        case "assistant":
            return [user, message, user]
        case "tool":
            call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            return [user, calling, {**message, "name": "f", "tool_call_id": "call00001"}]
        case _:
            return [message, user]


def _marked(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, list):
        *before, last = content or [_part("")]
        marked: str | list[Message] = [*before, _part(f"{last['text']}{_END_OF_CONTENT} ")]
    else:
        marked = f"{content}{_END_OF_CONTENT} "
    return {**message, "content": marked}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compiled(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError, also for what Jinja takes and Python does not."""
    try:
        return _environment().from_string(source)
    except (SyntaxError, RecursionError) as error:
        raise jinja2.TemplateSyntaxError(str(error), getattr(error, "lineno", None) or 1) from error


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.tests["none"] = is_none
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = _from_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _from_json(text: str) -> Any:
    """llama.cpp's, for arguments that are still a text."""
    return text if isinstance(text, UnreadableArguments) else json.loads(text)


def _plain(value: object) -> None:
    if not isinstance(value, NoContent):
        raise TypeError(f"{type(value).__name__} has no JSON")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)
