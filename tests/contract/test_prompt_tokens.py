"""A prompt's token ids: what the router makes with an engine's own description, and what the engine itself makes."""

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from kvasir_chat.open_responses import input_items
from kvasir_chat.template import ChatTemplate
from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import Dialect
from kvasir_router.dialects.messages import Messages
from kvasir_router.dialects.responses import Responses
from kvasir_router.dialects.text_prompts import Completions
from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer, TokenizerCard
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.body import parse
from kvasir_runtime.server.messages_request import MessagesRequest
from kvasir_runtime.server.open_responses_request import ResponsesRequest
from kvasir_runtime.server.prompts import PromptBuilder, translated
from kvasir_runtime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvasir_runtime.server.resolving import Limits
from kvasir_runtime.server.responses import to_json
from kvasir_runtime.server.tokenizer_description import TokenizerDescription

FOLDER = Path(__file__).parents[2] / "examples/models/kvasir-python-700k"
LIMITS = Limits(max_model_len=10_000, vocab_size=10**6, max_n=1, max_num_seqs=1, max_sequences=8, max_logprobs=0)
TEMPLATES = {
    "example": (FOLDER / "chat_template.jinja").read_text(),
    "trims": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "blocks": "{%- for m in messages %}\n  {%- if m.tool_calls %}\n    {%- for call in m.tool_calls %}\n"
    "{{ call.function.name }}({{ call.function.arguments | tojson }})\n    {%- endfor %}\n  {%- else %}\n"
    "{%- generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n  {%- endif %}\n"
    "  {%- if m.name is defined %}{{ m.name }}{% endif %}{%- if loop.index > 90 %}{% break %}{% endif %}\n"
    "{%- endfor %}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ bos_token is defined }}",
    "thinks": "{% set ns = namespace(seen=false) %}{% for m in messages %}"
    "{% if m.reasoning_content is defined and enable_thinking %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
    "{% endfor %}{{ strftime_now('%Y') }}{{ {'a': '<é>'} | tojson(indent=1) }}",
    "refuses": "{{ raise_exception('not today') }}",
    "changes": "{{ messages.append(1) }}",
    "silent": "nothing of it",
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "<é>"}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "def hello(name): <|im_end|> 日本語 "}],
    [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "one"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"}],
    [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "three ", "reasoning": "because"},
    ],
    [{"role": "assistant", "content": "no question", "reasoning_content": "hm", "refusal": None}],
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"add_special_tokens": True},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"messages": []}},
    {"documents": [{"title": "t"}]},
    {"chat_template_kwargs": None, "add_generation_prompt": None, "add_special_tokens": None, "documents": None},
]


class Both:
    """An engine's prompts, and a router that has only its description."""

    def __init__(self, template: str | None, settings: dict[str, Any] | None = None) -> None:
        tokenizer = Tokenizer.load(FOLDER)
        if settings is not None:
            backend = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
            tokenizer = Tokenizer(backend, tokenizer.settings | settings)
        compiled = None if template is None else ChatTemplate(template, tokenizer.special_tokens)
        self.engine = PromptBuilder(tokenizer, compiled)
        card = msgspec.json.decode(to_json(TokenizerDescription(tokenizer, template).response), type=TokenizerCard)
        self.router = PromptTokenizer(card, PieceCache(10**6))

    def check_chat(self, body: dict[str, Any]) -> list[int] | None:
        encoded = msgspec.json.encode({"model": "m", **body})
        return self._check(Chat(), encoded, lambda: parse(ChatCompletionRequest, encoded))

    def check_messages(self, body: dict[str, Any]) -> list[int] | None:
        encoded = msgspec.json.encode({"model": "m", "max_tokens": 9, **body})
        return self._check(
            Messages(), encoded, lambda: parse(MessagesRequest, encoded).to_chat(drops_client_header=True)
        )

    def check_responses(self, body: dict[str, Any]) -> list[int] | None:
        encoded = msgspec.json.encode({"model": "m", **body})
        asked = parse(ResponsesRequest, encoded)
        return self._check(Responses(), encoded, lambda: asked.to_chat(translated(lambda: input_items(asked.input)), 0))

    def _check(
        self, dialect: Dialect, encoded: bytes, to_chat: Callable[[], ChatCompletionRequest]
    ) -> list[int] | None:
        """The same tokens, or refused by the engine and unknown to the router."""
        prompt = dialect.prompt(dialect.read(encoded), "m")
        assert prompt is not None
        made = self.router.tokens(prompt)
        router = None if made is None else list(array("I", made))
        try:
            engine = asyncio.run(self.engine.chat_prompt(to_chat(), LIMITS)).token_ids
        except InvalidRequestError:
            engine = None
        assert router == engine or (engine is None and not router)
        return engine


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_engines_tokens(name: str, fields: dict[str, Any]) -> None:
    both = Both(TEMPLATES[name])
    for messages in CONVERSATIONS:
        both.check_chat({"messages": messages, **fields})


MESSAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "def hello(name): 日本語 "}], "system": "Be brief."},
    {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I "}],
    },
    {"messages": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]},
    {
        "messages": [
            {"role": "user", "content": "1 + 2"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1, "b": "<é>"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}},
    {"messages": [{"role": "user", "content": "Hi"}], "output_config": {"effort": "low"}},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_in_anthropics_words_has_the_engines_tokens(name: str) -> None:
    both = Both(TEMPLATES[name])
    for body in MESSAGES:
        both.check_messages(body)


RESPONSES: list[dict[str, Any]] = [
    {"input": "def hello(name): 日本語 ", "instructions": "Be brief."},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "add", "namespace": "math", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
        ],
        "tools": [
            {"type": "namespace", "name": "math", "tools": [{"type": "function", "name": "add", "parameters": {}}]},
            {
                "type": "custom",
                "name": "patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
            },
            {"type": "web_search"},
        ],
        "reasoning": {"effort": "low"},
    },
    {"input": "Hi", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
    {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_of_items_has_the_engines_tokens(name: str) -> None:
    both = Both(TEMPLATES[name])
    for body in RESPONSES:
        both.check_responses(body)


def test_what_of_items_is_no_text_is_refused() -> None:
    both = Both(TEMPLATES["example"])
    assert [both.check_responses(body) is None for body in RESPONSES] == [False, False, False, True]


def test_what_of_anthropics_blocks_is_no_text_is_refused() -> None:
    both = Both(TEMPLATES["example"])
    assert [both.check_messages(body) is None for body in MESSAGES] == [False] * 7 + [True]


def test_most_of_these_conversations_are_not_refused() -> None:
    both = Both(TEMPLATES["example"])
    assert all(both.check_chat({"messages": messages}) for messages in CONVERSATIONS)


def test_a_model_without_template_takes_no_conversation() -> None:
    assert Both(None).check_chat({"messages": CONVERSATIONS[0]}) is None


@pytest.mark.parametrize("settings", [None, {"bos_token": "<|endoftext|>", "add_bos_token": True}])
@pytest.mark.parametrize("text", ["def hello(name):\n    return 1", "<|im_start|>user", " 日本語", "a" * 20_000])
def test_a_text_has_the_engines_tokens(text: str, settings: dict[str, Any] | None) -> None:
    both = Both(TEMPLATES["example"], settings)
    encoded = msgspec.json.encode({"prompt": text})
    dialect = Completions()
    prompt = dialect.prompt(dialect.read(encoded), None)
    assert prompt is not None
    made = both.router.tokens(prompt)
    assert made is not None
    (engine,) = asyncio.run(both.engine.completion_prompts(parse(CompletionRequest, encoded), LIMITS))
    assert list(array("I", made)) == engine.token_ids


def test_tools_are_shown_to_the_template() -> None:
    """Engines of ours refuse them as yet; a template prints what it was given."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    both = Both("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}")
    dialect = Chat()
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], "tools": tools})
    prompt = dialect.prompt(dialect.read(body), "m")
    assert prompt is not None
    made = both.router.tokens(prompt)
    expected = both.router.encode(
        '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]hi',
        add_special_tokens=False,
    )
    assert made == expected
