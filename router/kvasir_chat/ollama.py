"""Requests of Ollama's /api/chat and /api/generate in chat's words.

What Ollama says of the model that it loads (`num_ctx`, `keep_alive`, ...) is the operator's here and changes nothing.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvasir_chat.messages import ConversationRefusedError, Message

LATEST = ":latest"
"""Clients put it behind names without a tag."""
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OPTIONS = dict(zip(_SAME, _SAME, strict=True)) | {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
_REFUSED: Mapping[str, Any] = {"options.mirostat": 0, "options.tfs_z": 1, "options.typical_p": 1} | dict.fromkeys(
    ("context", "logprobs", "raw", "suffix", "template")
)
"""Each with what it may be."""


def only_loads(asked: Mapping[str, Any]) -> bool:
    """Whether nothing is said, as clients do to have the model loaded."""
    return asked.get("messages") == [] or ("messages" not in asked and asked.get("prompt") in (None, ""))


def chat_request(asked: Mapping[str, Any]) -> dict[str, Any]:
    """As a stream; of /api/generate, whose prompt is a user's only message, where there are no messages. Where nothing
    is said, one token is asked for. Raises ConversationRefusedError.
    """
    options = asked.get("options") or {}
    if not isinstance(options, dict):
        raise ConversationRefusedError("options: an object is expected", "options")
    for name, neutral in _REFUSED.items():
        owner = options if "." in name else asked
        if owner.get(name.rpartition(".")[2]) not in (None, neutral, False, "", []):
            raise ConversationRefusedError(f"{name}: this cannot be done here; leave it out", name)
    sampling = {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
    if isinstance(limit := sampling.get("max_tokens"), int) and limit < 0:
        del sampling["max_tokens"]  # no bound but the context's
    if only_loads(asked):
        asked, sampling = {"model": asked.get("model"), "prompt": ""}, {"max_tokens": 1}
    fields = {
        **sampling,
        "model": asked["model"].removesuffix(LATEST) if isinstance(asked.get("model"), str) else None,
        "messages": _messages(asked["messages"] if "messages" in asked else _generates(asked)),
        "tools": asked.get("tools") or None,
        "response_format": _response_format(asked.get("format")),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_thinking(asked.get("think")),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _generates(asked: Mapping[str, Any]) -> list[Message]:
    system = [{"role": "system", "content": asked["system"]}] if asked.get("system") else []
    return [*system, {"role": "user", "content": asked.get("prompt"), "images": asked.get("images")}]


def _response_format(wanted: Any) -> dict[str, Any] | None:
    if not wanted or wanted == "json":
        return {"type": "json_object"} if wanted else None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted, "strict": True}}


def _thinking(think: Any) -> dict[str, Any]:
    if think is True:
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    return {} if think is None else {"reasoning_effort": think or "none"}


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise ConversationRefusedError("messages: a list of messages is expected, which are objects", "messages")
    unanswered: list[Message] = []
    return [_message(message, index, unanswered) for index, message in enumerate(given)]


def _message(message: Message, place: int, unanswered: list[Message]) -> Message:
    """`unanswered`: calls so far whose results are yet to come. In this API they need no ids."""
    made: Message = {"role": message.get("role"), "content": message.get("content") or ""}
    if images := message.get("images"):
        if not isinstance(images, list):
            raise ConversationRefusedError(f"messages[{place}].images: a list is expected", f"messages[{place}].images")
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}} for image in images]
        made["content"] = [{"type": "text", "text": made["content"]}, *parts]
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    if calls := message.get("tool_calls"):
        try:
            made["tool_calls"] = [_call(call, f"call_{place}_{index}") for index, call in enumerate(calls)]
        except (TypeError, LookupError, AttributeError) as error:
            field = f"messages[{place}].tool_calls"
            expected = "objects are expected with a function, which has a name and arguments"
            raise ConversationRefusedError(f"{field}: {expected}", field) from error
        unanswered += made["tool_calls"]
    if made["role"] == "tool":
        made["tool_call_id"] = message.get("tool_call_id") or _answered(message.get("tool_name"), unanswered)
    return made


def _answered(name: Any, unanswered: list[Message]) -> str:
    """The id of the oldest call, of this name if it is given."""
    found = next((call for call in unanswered if call["function"]["name"] == name), None)
    if found is None and not unanswered:
        return f"call_{name}"
    call = found or unanswered[0]
    unanswered.remove(call)
    return str(call["id"])


def _call(call: Message, call_id: str) -> Message:
    name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call.get("id") or call_id, "type": "function", "function": function}
