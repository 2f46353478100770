"""Conversations of OpenAI's Responses API, which are lists of items, as messages in the shape that chat templates take,
and its tools as functions.

Router and engine both do this, so that the prompt that the one looks up is the prompt that the other computes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir_chat.messages import ConversationRefusedError, Message, text_of

Item = dict[str, Any]
CUSTOM_INPUT = "input"
"""The only argument of a custom tool, which takes a text."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of parts, and where their text is."""


def input_items(given: Any) -> list[Item]:
    """A text is one message of the user's. Raises ConversationRefusedError."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ConversationRefusedError("input: a text or a list of at least one item is expected", "input")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise ConversationRefusedError(f"input[{index}]: an item is expected, an object", f"input[{index}]")
    return given


def chat_messages(instructions: Any, items: Sequence[Item], num_earlier: int = 0) -> list[Message]:
    """`num_earlier`: of the items, those that stand in earlier requests. Raises ConversationRefusedError, which names
    the item that cannot be part of a prompt here.
    """
    chat: list[Message] = []
    if isinstance(instructions, str) and instructions:
        chat.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        _add(chat, item, f"input[{index - num_earlier}]")
    return chat


def _add(chat: list[Message], item: Item, field: str) -> None:
    match item.get("type") or "message":
        case "message":
            _add_message(chat, item, field)
        case "reasoning":
            _add_thought(chat, item, field)
        case "function_call":
            _add_call(chat, item, text_of(item, "arguments", field), field)
        case "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: text_of(item, "input", field)}, ensure_ascii=False)
            _add_call(chat, item, arguments, field)
        case "function_call_output" | "custom_tool_call_output":
            output = _content(item.get("output"), f"{field}.output")
            chat.append({"role": "tool", "tool_call_id": text_of(item, "call_id", field), "content": output})
        case kind:
            raise ConversationRefusedError(
                f"{field}: an item of the type {str(kind)[:40]!r} cannot be part of a prompt here; leave it out, or "
                "send it as a message",
                field,
            )


def _add_message(chat: list[Message], item: Item, field: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise ConversationRefusedError(f"{field}: it is no message with one of the roles {', '.join(_ROLES)}", field)
    content = _content(item.get("content"), f"{field}.content")
    if role == "assistant" and (thinking := _last_assistant(chat)) is not None and not _has_said(thinking):
        thinking["content"] = content
    else:
        chat.append({"role": role, "content": content})


def _add_thought(chat: list[Message], item: Item, field: str) -> None:
    """The model's own words; a summary only where those are not given."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise ConversationRefusedError(f"{field}: a thought's content and its summary are lists of parts", field)
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts:
        return
    last = _last_assistant(chat)
    if last is None or _has_said(last):
        chat.append(last := {"role": "assistant", "content": None})
    before = [last["reasoning_content"]] if "reasoning_content" in last else []
    last["reasoning_content"] = "\n".join([*before, *texts])


def _add_call(chat: list[Message], item: Item, arguments: str, field: str) -> None:
    name = _with_namespace(item.get("namespace"), text_of(item, "name", field))
    last = _last_assistant(chat)
    if last is None:
        chat.append(last := {"role": "assistant", "content": None})
    function = {"name": name, "arguments": arguments}
    call = {"id": text_of(item, "call_id", field), "type": "function", "function": function}
    last.setdefault("tool_calls", []).append(call)


def _last_assistant(chat: list[Message]) -> Message | None:
    return chat[-1] if chat and chat[-1]["role"] == "assistant" else None


def _has_said(message: Message) -> bool:
    return message["content"] is not None or "tool_calls" in message


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as clients know it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None
    described: Mapping[str, Any]
    field: str

    @property
    def called_name(self) -> str:
        """As the model knows it."""
        return _with_namespace(self.namespace, self.name)


def offered_tools(tools: Any) -> list[OfferedTool]:
    """Those that clients run themselves. The others, which run at OpenAI, are left out: clients offer them unasked.

    Raises ConversationRefusedError.
    """
    return [*_offered(tools or [], None, "tools")]


def _offered(tools: Any, namespace: str | None, field: str) -> Iterator[OfferedTool]:
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        place = f"{field}[{index}]"
        if not isinstance(tool, dict):
            raise ConversationRefusedError(f"{place}: a tool is expected, which is an object", place)
        match tool.get("type"):
            case "namespace" if namespace is None:
                yield from _offered(tool.get("tools") or [], text_of(tool, "name", place), f"{place}.tools")
            case "function" | "custom" as kind:
                yield OfferedTool(kind, text_of(tool, "name", place), namespace, tool, place)


def chat_tool(tool: OfferedTool) -> Message:
    """Raises ConversationRefusedError."""
    function: Message = {"name": tool.called_name}
    if tool.kind == "custom":
        function["description"] = _custom_description(tool)
        properties = {CUSTOM_INPUT: {"type": "string"}}
        function["parameters"] = {"type": "object", "properties": properties, "required": [CUSTOM_INPUT]}
    else:
        for key in ("description", "parameters", "strict"):
            if tool.described.get(key) is not None:
                function[key] = tool.described[key]
    return {"type": "function", "function": function}


def _custom_description(tool: OfferedTool) -> str:
    """With the grammar of its input, which nothing else tells a model beforehand."""
    description, wanted = tool.described.get("description") or "", input_format(tool)
    if wanted is None:
        return str(description)
    syntax, definition = wanted
    return f"{description}\nThe input follows this {syntax} grammar:\n{definition}".strip()


def input_format(tool: OfferedTool) -> tuple[str, str] | None:
    """Syntax and definition of the grammar of a custom tool's input. Raises ConversationRefusedError."""
    wanted = tool.described.get("format") if tool.kind == "custom" else None
    if not isinstance(wanted, dict) or wanted.get("type") != "grammar":
        return None
    syntax, definition = (text_of(wanted, key, f"{tool.field}.format") for key in ("syntax", "definition"))
    return syntax, definition


def tool_choice(choice: Any, tools: Sequence[OfferedTool]) -> dict[str, Any]:
    """Chat's field for it. Raises ConversationRefusedError."""
    if choice is None or (not tools and choice in ("auto", "none")):
        return {}
    if isinstance(choice, str):
        return {"tool_choice": choice}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return {"tool_choice": _named(choice, tools)}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [_named(each, tools) for each in choice["tools"]]}
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    raise ConversationRefusedError(
        f"tool_choice: a choice of the type {str(kind)[:40]!r} cannot be made here; auto, none, required, function, "
        "custom and allowed_tools can",
        "tool_choice",
    )


def _named(choice: Any, tools: Sequence[OfferedTool]) -> Message:
    name = text_of(choice if isinstance(choice, dict) else {}, "name", "tool_choice")
    known = [tool.called_name for tool in tools if name in (tool.name, tool.called_name)]
    return {"type": "function", "function": {"name": known[0] if known else name}}


def _with_namespace(namespace: Any, name: str) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _content(content: Any, field: str) -> str | list[Message]:
    """Templates that take no parts get one text anyway."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationRefusedError(f"{field}: a text or a list of parts is expected", field)
    texts = [_part_text(part, f"{field}[{index}]") for index, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise ConversationRefusedError(
            f"{field}: a part of the type {str(kind)[:40]!r} was given, but this server reads only text", field
        )
    return text_of(part, _TEXTS[kind], field)
