"""From what a client sends as prompt (text, token ids, messages) to token ids.

Long texts are tokenised in a thread, and texts that cannot fit the context are refused unread, so that one client's
huge prompt does not hold up the streams of the others.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ContextLengthError, InvalidRequestError
from kvasir_runtime.server.chat_template import ChatTemplate, Message
from kvasir_runtime.server.protocol import ChatMessage, ChatPrompt
from kvasir_runtime.server.sampling import check_token_ids

INLINE_CHARS = 8192
"""Shorter texts are tokenised on the event loop: about 2 ms, less than a thread's switch costs beside a busy core."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None
    """As the client sent it; None for token ids."""


class PromptBuilder:
    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    async def completion_prompts(
        self, prompt: object, *, add_special_tokens: bool, max_model_len: int, vocab_size: int
    ) -> list[Prompt]:
        """One or several, from a text, a list of texts, token ids or a list of those."""
        prompts = []
        for content in _split(prompt):
            if isinstance(content, str):
                token_ids = await self.encode(content, add_special_tokens, max_model_len, "prompt")
                prompts.append(Prompt(token_ids, content))
            else:
                check_token_ids(content, vocab_size, "prompt")
                prompts.append(Prompt(content, None))
            if not prompts[-1].token_ids:
                raise InvalidRequestError("prompt: it is empty, but at least one token is needed to go on", "prompt")
        return prompts

    async def chat_prompt(self, chat: ChatPrompt, max_model_len: int) -> list[int]:
        if self._chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template, so it cannot take messages; use /v1/completions, or start the server "
                "with --chat-template",
                "messages",
            )
        add_generation_prompt = chat.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not chat.continue_final_message
        text = self._chat_template.render(
            [_template_message(message, index) for index, message in enumerate(chat.messages)],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.chat_template_kwargs or {},
        )
        token_ids = await self.encode(text, chat.add_special_tokens, max_model_len, "messages")
        if not token_ids:
            raise InvalidRequestError("messages: the chat template made an empty prompt of them", "messages")
        return token_ids

    async def encode(self, text: str, add_special_tokens: bool, max_model_len: int, param: str) -> list[int]:
        """Raises ContextLengthError for a text that is certainly too long, before reading it."""
        longest = self._tokenizer.max_chars_per_token
        if longest is not None and len(text) > max_model_len * longest:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which is at least {-(-len(text) // longest)} tokens, but the "
                f"model's context is {max_model_len} tokens; shorten the prompt",
                param,
            )
        if len(text) <= INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _split(prompt: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) for part in prompt):
            return prompt
        if _are_token_ids(prompt):
            return [prompt]
        if all(isinstance(part, list) and _are_token_ids(part) for part in prompt):
            return prompt
    seen = "nothing" if prompt is None else repr(prompt)[:80]
    raise InvalidRequestError(
        f"prompt: {seen} was given, but it should be a text, a list of texts, a list of token ids or a list of those, "
        "and not empty",
        "prompt",
    )


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _template_message(message: ChatMessage, index: int) -> Message:
    """What chat templates expect: content as one text, tool calls with parsed arguments, absent keys absent."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and message.role != "assistant":
        field = f"messages[{index}].content"
        raise InvalidRequestError(f"{field}: a message of the role {message.role!r} needs content", field)
    role = "system" if message.role == "developer" else message.role  # OpenAI renamed it; templates know the old name
    rendered: Message = {"role": role, "content": content or ""}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, key)) is not None:
            rendered[key] = value
    if message.reasoning is not None:
        rendered.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        rendered["tool_calls"] = [_parsed_tool_call(call, index) for call in message.tool_calls]
    return rendered


def _parsed_tool_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """OpenAI sends a call's arguments as JSON in a string; chat templates want the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        field = f"messages[{index}].tool_calls"
        raise InvalidRequestError(f"{field}: a call's arguments are not valid JSON: {error}", field) from error
    return {**call, "function": {**function, "arguments": arguments}}
