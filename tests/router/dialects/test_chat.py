import json
from typing import Any

import pytest

from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import Prompt

TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
SOUND = {"type": "input_audio", "input_audio": {"data": "B" * 100_000, "format": "wav"}}


def prompt(messages: Any, **fields: Any) -> Prompt:
    chat = Chat()
    found = chat.prompt(chat.read(json.dumps({"messages": messages} | fields).encode()), "m")
    assert found is not None
    return found


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("part", [IMAGE, SOUND])
def test_images_and_sounds_are_not_counted_as_text(part: dict[str, Any]) -> None:
    more = len(prompt(said([TEXT, part])).content) - len(prompt(said([TEXT])).content)
    assert 0 < more < 20


def test_another_image_makes_another_prompt() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "C" * 100_000}}
    assert prompt(said([TEXT, IMAGE])).content != prompt(said([TEXT, other])).content


def test_text_is_the_same_in_parts_and_as_a_whole() -> None:
    assert prompt(said([TEXT])).content == prompt(said(TEXT["text"])).content


def test_text_is_counted_by_its_utf8_bytes() -> None:
    assert len(prompt(said("ä" * 40)).content) - len(prompt(said("")).content) == 80


def test_key_order_and_spacing_do_not_matter() -> None:
    chat = Chat()
    one, other = (
        chat.prompt(chat.read(body), "m")
        for body in (
            b'{"messages": [{"role": "user", "content": "0123456789"}]}',
            b'{"messages":[{"content":"0123456789",  "role":"user"}]}',
        )
    )
    assert one is not None
    assert other is not None
    assert one.content == other.content != b""


@pytest.mark.parametrize("changed", [{"role": "system"}, {"name": "x"}, {"tool_calls": [{"id": "1"}]}])
def test_what_a_message_says_besides_its_text_counts(changed: dict[str, Any]) -> None:
    message = {"role": "user", "content": "hi"}
    assert prompt([message]).content != prompt([message | changed]).content


def test_what_a_chat_template_takes_is_there_as_it_came() -> None:
    messages, tools = said("hi"), [{"type": "function"}]
    found = prompt(messages, tools=tools, chat_template_kwargs={"enable_thinking": False}, temperature=1)
    assert found.messages is not None
    assert json.loads(bytes(found.messages)) == messages
    given = {name: json.loads(bytes(value)) for name, value in found.template_fields}
    assert given == {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}


def test_without_messages_there_is_no_prompt() -> None:
    chat = Chat()
    assert chat.prompt(chat.read(b'{"prompt": "text"}'), "m") is None
