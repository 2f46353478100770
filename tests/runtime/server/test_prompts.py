"""Long prompts and many of them take turns with everything else on the event loop."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvasir_chat.template import ChatTemplate
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.server.prompts import (
    INLINE_CHARS,
    INLINE_MESSAGES,
    NUM_RENDERERS,
    PromptBuilder,
    load_chat_template,
)
from kvasir_runtime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvasir_runtime.server.resolving import Limits

LIMITS = Limits(max_model_len=10**6, vocab_size=320, max_n=1, max_num_seqs=1, max_sequences=2048, max_logprobs=0)
LONG = "a" * (INLINE_CHARS + 1)
MANY = (os.cpu_count() or 1) + 8
"""More than asyncio has threads for everything else."""


class WatchedTemplate(ChatTemplate):
    """Notes the thread that it is rendered on."""

    def __init__(self) -> None:
        super().__init__("{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}", {})
        self.threads: list[threading.Thread] = []

    def render(self, messages: Any, **options: Any) -> str:
        self.threads.append(threading.current_thread())
        return super().render(messages, **options)


class HangingTemplate(ChatTemplate):
    """Renders until it is told to end."""

    def __init__(self) -> None:
        super().__init__("a", {})
        self.num_begun = 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def render(self, *arguments: object, **options: object) -> str:
        self.num_begun += 1
        self.has_begun.set()
        assert self.may_end.wait(10)
        return super().render(*arguments, **options)  # type: ignore[arg-type]


@pytest.fixture
def tokenizer(model_folder) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.mark.parametrize(
    ("messages", "is_inline"),
    [
        ([{"role": "user", "content": "a" * INLINE_CHARS}], True),
        ([{"role": "user", "content": "a" * (INLINE_CHARS + 1)}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "a" * (INLINE_CHARS // 2 + 1)}] * 2}], False),
        ([{"role": "user", "content": "a"}] * INLINE_MESSAGES, True),
        ([{"role": "user", "content": "a"}] * (INLINE_MESSAGES + 1), False),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * (INLINE_CHARS + 1)}], False),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], False),
        ([{"role": "user", "content": "a", "name": LONG}], False),
        ([{"role": "tool", "content": "a", "tool_call_id": LONG}], False),
        ([{"role": "assistant", "content": "a", "reasoning": LONG}], False),
        ([{"role": "assistant", "content": "a", "reasoning_content": LONG}], False),
    ],
)
def test_long_conversations_are_rendered_beside_the_event_loop(tokenizer, messages, is_inline: bool) -> None:
    assert is_rendered_inline(tokenizer, messages=messages) is is_inline


@pytest.mark.parametrize(
    ("variables", "is_inline"),
    [
        ({"enable_thinking": False, "budget": 5, "effort": "low"}, True),
        ({"custom_tools": []}, False),
        ({"settings": {}}, False),
        ({"date": LONG}, False),
        ({LONG: 1}, False),
    ],
)
def test_what_else_a_template_sees_counts_as_well(tokenizer, variables: dict[str, Any], is_inline: bool) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert is_rendered_inline(tokenizer, messages=messages, chat_template_kwargs=variables) is is_inline


@pytest.mark.parametrize("more", [{"tools": [{"function": {"name": "f"}}]}, {"reasoning_effort": LONG}])
def test_long_fields_of_the_request_count_too(tokenizer, more: dict[str, Any]) -> None:
    assert not is_rendered_inline(tokenizer, messages=[{"role": "user", "content": "a"}], **more)


def is_rendered_inline(tokenizer: Tokenizer, **fields: Any) -> bool:
    template = WatchedTemplate()
    chat = ChatCompletionRequest.model_validate(fields)
    asyncio.run(PromptBuilder(tokenizer, template).chat_prompt(chat, LIMITS))
    [thread] = template.threads
    return thread is threading.main_thread()


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ({}, {}),
        ({"name": "n"}, {"name": "n"}),
        ({"name": None, "tool_calls": None, "refusal": None, "annotations": []}, {}),
        ({"reasoning": "r"}, {"reasoning_content": "r", "reasoning": "r", "thinking": "r"}),
        ({"reasoning": "r", "reasoning_content": "c"}, {"reasoning_content": "c", "reasoning": "c", "thinking": "c"}),
        ({"role": "tool", "tool_call_id": "t"}, {"role": "tool", "tool_call_id": "t"}),
        (
            {"tool_calls": [{"id": "i", "function": {"name": "f"}}]},
            {"tool_calls": [{"id": "i", "function": {"name": "f", "arguments": {}}}]},
        ),
    ],
)
def test_a_template_sees_the_keys_of_a_message_that_were_sent(tokenizer, sent: dict, seen: dict) -> None:
    plain = {"role": "assistant", "content": "a"}
    chat = ChatCompletionRequest.model_validate({"messages": [plain | sent], "documents": [{"title": "d"}]})
    template = ChatTemplate("{{ [messages[0], documents] | tojson }}", {})
    token_ids = asyncio.run(PromptBuilder(tokenizer, template).chat_prompt(chat, LIMITS)).token_ids
    assert json.loads(tokenizer.decode(token_ids)) == [plain | seen, [{"title": "d"}]]


TOOL = {"function": {"strict": True, "parameters": {"type": "object"}, "name": "f", "x-own": 1}, "type": "function"}


def test_a_template_sees_tools_as_they_were_sent_and_the_effort(tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "reasoning_effort": "low"}
    template = ChatTemplate("{{ [tools, reasoning_effort, enable_thinking] | tojson }}", {})
    chat = ChatCompletionRequest.model_validate_json(json.dumps(body))
    token_ids = asyncio.run(PromptBuilder(tokenizer, template).chat_prompt(chat, LIMITS)).token_ids
    assert tokenizer.decode(token_ids) == json.dumps([[TOOL], "low", True])


def settings_with(templates: Any) -> dict[str, str]:
    return {"tokenizer_config.json": json.dumps({"chat_template": templates})}


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (settings_with("own"), "own"),
        (settings_with(NAMED), "d"),
        (settings_with({"default": "d", "rag": "r"}), "d"),
        (settings_with({"rag": "r"}), "r"),
        (settings_with(None), None),
        ({"chat_template.jinja": "file\r\n", **settings_with("own")}, "file\n"),
        ({"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "r", **settings_with(NAMED)}, "file"),
        ({"additional_chat_templates/default.jinja": "d", "additional_chat_templates/a.jinja": "a"}, "d"),
        ({"additional_chat_templates/rag.jinja": "r", **settings_with("own")}, "r"),
        ({"chat_template.jinja": "\ufefffile"}, "file"),
    ],
)
def test_a_checkpoints_template_is_found_where_transformers_looks_for_it(
    tmp_path: Path, model_folder: Path, files: dict[str, str], source: str | None
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    template = load_chat_template(tmp_path, Tokenizer.load(tmp_path), None)
    assert (None if template is None else template.source) == source


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x\n{% for %}", "line 2"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "no valid Jinja.*nested"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "no valid Jinja.*recursion"),
        (7, "tokenizer_config.json"),
        ({"a": 1}, "neither"),
    ],
)
def test_a_template_that_is_none_is_refused_by_name(
    tmp_path: Path, model_folder: Path, source: object, named: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ConfigurationError, match=named):
        load_chat_template(tmp_path, Tokenizer.load(tmp_path), None)


def test_a_link_to_a_template_that_is_gone_is_no_reason_to_take_another(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "former"}))
    (tmp_path / "chat_template.jinja").symlink_to("blobs/gone")
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja cannot be read"):
        load_chat_template(tmp_path, Tokenizer.load(tmp_path), None)


def test_conversations_that_take_long_to_render_leave_threads_to_those_who_tokenise(tokenizer) -> None:
    template = HangingTemplate()
    builder = PromptBuilder(tokenizer, template)
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": LONG}]})

    async def tokenise_beside_them() -> int:
        renderings = [asyncio.create_task(builder.chat_prompt(chat, LIMITS)) for _ in range(MANY)]
        await asyncio.to_thread(template.has_begun.wait, 5)
        await asyncio.wait_for(builder.encode(LONG, False, LIMITS.max_model_len, "prompt"), 5)
        num_at_once = template.num_begun
        template.may_end.set()
        await asyncio.gather(*renderings)
        return num_at_once

    assert asyncio.run(tokenise_beside_them()) <= NUM_RENDERERS


def test_others_have_their_turn_between_prompts(tokenizer) -> None:
    wishes = CompletionRequest.model_validate({"prompt": ["a", [5], "b"]})

    async def build_beside_another() -> list[int]:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count())
        prompts = await PromptBuilder(tokenizer, None).completion_prompts(wishes, LIMITS)
        other.cancel()
        return [len(prompts), num_turns]

    assert asyncio.run(build_beside_another()) == [3, 3]
