"""Long prompts and many of them take turns with everything else on the event loop."""

import asyncio
import threading

import pytest

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.chat_template import ChatTemplate
from kvasir_runtime.server.prompts import INLINE_CHARS, INLINE_MESSAGES, PromptBuilder
from kvasir_runtime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvasir_runtime.server.sampling import Limits

LIMITS = Limits(max_model_len=10**6, vocab_size=320, max_n=1, max_beam_width=1, max_sequences=2048, max_logprobs=0)


class WatchedTemplate(ChatTemplate):
    """Notes the thread that it is rendered on."""

    def __init__(self) -> None:
        super().__init__("{% for message in messages %}{{ message.content }}{% endfor %}", {})
        self.threads: list[threading.Thread] = []

    def render(self, *arguments: object, **options: object) -> str:
        self.threads.append(threading.current_thread())
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
        ([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}, {}]}], False),
    ],
)
def test_long_conversations_are_rendered_beside_the_event_loop(tokenizer, messages, is_inline: bool) -> None:
    template = WatchedTemplate()
    chat = ChatCompletionRequest.model_validate({"messages": messages})
    asyncio.run(PromptBuilder(tokenizer, template).chat_prompt(chat, LIMITS))
    assert [thread is threading.main_thread() for thread in template.threads] == [is_inline]


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
