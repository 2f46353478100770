"""Messages to the text that an engine makes of them, with the engine's own Jinja template.

The same template in the same environment as in our engine (tests/contract/test_prompt_tokens.py compares the two): what
transformers shows to templates, in Jinja's immutable sandbox, since they come from checkpoints. Unlike the engine this
refuses nothing: a conversation that cannot be rendered is None, and the engine says what is wrong with it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from kvasir_router.dialects.dialect import Prompt

_END_OF_CONTENT = (
    "\N{SYMBOL FOR UNIT SEPARATOR}end of content\N{SYMBOL FOR UNIT SEPARATOR}"  # no white space: templates trim
)
_OWN_FIELDS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Message = dict[str, Any]


class ConversationFields(msgspec.Struct):
    """What of a chat request's body decides about its prompt, besides the messages."""

    tools: list[Any] | None = None
    documents: list[Any] | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = False


class ChatTemplate:
    """`special_tokens` (`bos_token`, ...) are those that the template may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], fields: ConversationFields) -> str | None:
        variables = fields.chat_template_kwargs or {}
        if not messages or fields.chat_template is not None or _OWN_FIELDS & variables.keys():
            return None
        try:
            return self._continued(messages, fields) if fields.continue_final_message else self._ended(messages, fields)
        except _RENDER_ERRORS:
            return None

    def _ended(self, messages: Sequence[Message], fields: ConversationFields) -> str:
        return self._text(messages, fields, add_generation_prompt=fields.add_generation_prompt is not False)

    def _continued(self, messages: Sequence[Message], fields: ConversationFields) -> str | None:
        """Up to where the last message's content ends, which may be anywhere in what the template makes of it."""
        last = messages[-1]
        marked = {**last, "content": (last.get("content") or "") + _END_OF_CONTENT + " "}
        text = self._text([*messages[:-1], marked], fields, add_generation_prompt=False)
        before, mark, after = text.rpartition(_END_OF_CONTENT)
        if not mark:
            return None
        return before if after.startswith(" ") else before.rstrip()  # a template that trims has taken the space

    def _text(self, messages: Sequence[Message], fields: ConversationFields, *, add_generation_prompt: bool) -> str:
        return self._template.render(
            **self._special_tokens,
            **(fields.chat_template_kwargs or {}),
            messages=messages,
            tools=fields.tools or None,
            documents=fields.documents or None,
            add_generation_prompt=add_generation_prompt,
        )


def template_messages(prompt: Prompt) -> list[Message] | None:
    """A chat prompt's messages as templates expect them; None where an engine would refuse them, or has more than text.

    Raises msgspec.DecodeError.
    """
    if prompt.messages is None:
        return None
    messages = msgspec.json.decode(prompt.messages)
    if not isinstance(messages, list):
        return None
    templated = [_template_message(message) for message in messages]
    return None if None in templated else [message for message in templated if message is not None]


def conversation_fields(prompt: Prompt) -> ConversationFields:
    """Raises msgspec.ValidationError, a DecodeError, for a value that an engine would refuse."""
    return msgspec.json.decode(msgspec.json.encode(dict(prompt.template_fields)), type=ConversationFields)


def _template_message(message: Any) -> Message | None:
    """Content as one text, tool calls with parsed arguments, absent keys absent."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        return None
    content = _text_of(message.get("content"))
    if content is None:
        return None
    templated: Message = {"role": "system" if role == "developer" else role, "content": content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (value := message.get(key)) is not None:
            templated[key] = value
    if (reasoning := message.get("reasoning")) is not None:
        templated.setdefault("reasoning_content", reasoning)
    if calls := message.get("tool_calls"):
        templated["tool_calls"] = [_parsed_call(call) for call in calls]
    return templated


def _text_of(content: Any) -> str | None:
    if content is None:
        return ""
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def _parsed_call(call: Any) -> Any:
    """A call's arguments come as JSON in a string; templates want the object. Unreadable ones raise DecodeError."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": msgspec.json.decode(arguments or "{}")}}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's tokens for training; its body is printed."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _plain_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern))
    return environment


def _plain_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)
