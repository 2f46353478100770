"""Conversations of Anthropic's Messages API as messages in OpenAI's shape, which chat templates are written for.

Router and engine both do this, so that the prompt that the one looks up is the prompt that the other computes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir_chat.messages import ConversationRefusedError, Message, text_of

CLIENT_HEADER = "x-anthropic-billing-header"
"""How the text begins that coding assistants put before their system prompt. It differs from request to request, so
with it no prompt begins as another."""
_ROLES = ("user", "assistant", "system")
_TOOL_KEYS = (
    ("description", "description", str, "a text"),
    ("input_schema", "parameters", dict, "an object"),
    ("strict", "strict", bool, "true or false"),
)
"""With chat's name for each, its type and how that is called."""
_SKIPPED = ("redacted_thinking",)
"""What only its maker can read."""


def chat_messages(system: Any, messages: Any, *, drops_client_header: bool) -> list[Message]:
    """Raises ConversationRefusedError, which names the block that cannot be part of a prompt here."""
    chat: list[Message] = []
    texts = _texts(system, "system")
    if drops_client_header and texts and texts[0].startswith(CLIENT_HEADER):
        del texts[0]
    if texts:
        chat.append({"role": "system", "content": _content(texts)})
    if not isinstance(messages, list) or not messages:
        raise ConversationRefusedError("messages: a list of at least one message is expected", "messages")
    for index, message in enumerate(messages):
        for made in _chat_messages(message, f"messages[{index}]"):
            _append(chat, made)
    return chat


def chat_tools(tools: Any) -> list[Message]:
    """Raises ConversationRefusedError for those that only Anthropic's own servers can run."""
    if not isinstance(tools, list | None):
        raise ConversationRefusedError("tools: a list of tools is expected", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]


def tool_choice(choice: Any) -> dict[str, Any]:
    """Chat's fields for it. Raises ConversationRefusedError."""
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        function = {"name": text_of(choice, "name", "tool_choice")}
        asked: dict[str, Any] = {"tool_choice": {"type": "function", "function": function}}
    elif isinstance(kind, str) and kind in kinds:
        asked = {"tool_choice": kinds[kind]}
    else:
        raise ConversationRefusedError(
            "tool_choice: an object of the type auto, any, none or tool (with a name) is expected", "tool_choice"
        )
    if _given(choice, "disable_parallel_tool_use", "tool_choice", bool, "true or false"):
        asked["parallel_tool_calls"] = False
    return asked


def thinking_fields(thinking: Any, output_config: Any, variables: Any) -> dict[str, Any]:
    """Chat's fields for how much is thought. `variables` are the template's own, which go before."""
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    effort = output_config.get("effort") if isinstance(output_config, dict) else None
    switched_on = {"enable_thinking": True, "thinking": True} if kind == "enabled" and effort is None else {}
    asked: dict[str, Any] = {}
    if kind == "disabled" or effort is not None:
        asked["reasoning_effort"] = "none" if kind == "disabled" else effort
    if isinstance(variables, dict) or switched_on:
        asked["chat_template_kwargs"] = switched_on | (variables if isinstance(variables, dict) else {})
    return asked


def is_prefilled(messages: Any) -> bool:
    """The answer's beginning stands in the request, and the rest is asked for."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _append(chat: list[Message], message: Message) -> None:
    """Turns of one role that follow each other are one turn."""
    last = chat[-1] if chat else None
    if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
        chat.append(message)
        return
    last["content"] = _content(_texts(last["content"], "") + _texts(message["content"], ""))
    for key in ("tool_calls", "reasoning_content"):
        if key in message:
            last[key] = last[key] + message[key] if key in last else message[key]


def _chat_messages(message: Any, field: str) -> Iterator[Message]:
    """One message holds a turn's text, and results of tools, which are messages of their own to a template."""
    if not isinstance(message, dict) or (role := message.get("role")) not in _ROLES:
        raise ConversationRefusedError(f"{field}: it is no message with one of the roles {', '.join(_ROLES)}", field)
    content, place = message.get("content"), f"{field}.content"
    if role == "assistant":
        yield _assistant_message(_blocks(content, place), place)
        return
    texts: list[str] = []
    if content == []:
        raise ConversationRefusedError(f"{place}: a message of the role {role!r} needs content", place)
    for index, block in enumerate(_blocks(content, place)):
        if role == "user" and block["type"] == "tool_result":
            if texts:
                yield {"role": role, "content": _content(texts)}
                texts = []
            yield _tool_message(block, f"{place}[{index}]")
        else:
            texts += _texts_of(block, f"{place}[{index}]")
    if texts:
        yield {"role": role, "content": _content(texts)}


def _assistant_message(blocks: Sequence[Mapping[str, Any]], field: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(blocks):
        place = f"{field}[{index}]"
        if block["type"] == "tool_use":
            calls.append(_call(block, place))
        elif block["type"] == "thinking":
            thoughts.append(text_of(block, "thinking", place))
        elif block["type"] not in _SKIPPED:
            texts += _texts_of(block, place)
    message: Message = {"role": "assistant", "content": _content(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], field: str) -> Message:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise ConversationRefusedError(f"{field}.input: an object is expected", f"{field}.input")
    function = {"name": text_of(block, "name", field), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": text_of(block, "id", field), "type": "function", "function": function}


def _tool_message(block: Mapping[str, Any], field: str) -> Message:
    texts = _texts(block.get("content"), f"{field}.content")
    return {"role": "tool", "tool_call_id": text_of(block, "tool_use_id", field), "content": _content(texts)}


def _tool(tool: Any, field: str) -> Message:
    if not isinstance(tool, dict):
        raise ConversationRefusedError(f"{field}: a tool is expected, which is an object", field)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise ConversationRefusedError(
            f"{field}: a tool of the type {str(kind)[:40]!r} runs at Anthropic only; leave it out, or describe it with "
            "name and input_schema and run it yourself",
            field,
        )
    function: Message = {"name": text_of(tool, "name", field)}
    for key, name, kept, expected in _TOOL_KEYS:
        if (value := _given(tool, key, field, kept, expected)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _given(item: Mapping[str, Any], key: str, field: str, kind: type, expected: str) -> Any:
    """None: it was not. Raises ConversationRefusedError, in the words of this API, for a value of another type."""
    value = item.get(key)
    if not isinstance(value, kind | None):
        raise ConversationRefusedError(f"{field}.{key}: {expected} is expected", f"{field}.{key}")
    return value


def _content(texts: Sequence[str]) -> str | list[Message]:
    """Templates that take no parts get one text anyway."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _blocks(content: Any, field: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ConversationRefusedError(f"{field}: a text or a list of blocks is expected", field)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            place = f"{field}[{index}]"
            raise ConversationRefusedError(f"{place}: a block is expected, which is an object with a type", place)
    return content


def _texts(content: Any, field: str) -> list[str]:
    if content is None or content == "":
        return []
    blocks = _blocks(content, field)
    return [text for index, block in enumerate(blocks) for text in _texts_of(block, f"{field}[{index}]")]


def _texts_of(block: Mapping[str, Any], field: str) -> list[str]:
    """Of a block that is nothing but text."""
    match block["type"]:
        case "text":
            return [text_of(block, "text", field)]
        case "search_result":
            heading = f"{text_of(block, 'title', field)}\n{text_of(block, 'source', field)}"
            return [heading, *_texts(block.get("content"), f"{field}.content")]
        case "document" if _is_text_document(block):
            title = block.get("title")
            return [*([title] if isinstance(title, str) else []), text_of(block["source"], "data", f"{field}.source")]
        case kind:
            raise ConversationRefusedError(
                f"{field}: a block of the type {kind[:40]!r} cannot stand here: this server reads text, documents of "
                "text, search results and, where they belong, thinking, tool_use and tool_result",
                field,
            )


def _is_text_document(block: Mapping[str, Any]) -> bool:
    source = block.get("source")
    return isinstance(source, dict) and source.get("type") == "text"
