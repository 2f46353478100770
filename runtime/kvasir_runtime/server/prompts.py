"""From what a client sends as prompt (text, token ids, messages) to token ids that the model knows.

No request holds up the streams of the others: how many prompts there are and how long each is comes before what is in
them, long texts are tokenised and long conversations rendered in a thread, and between prompts others get their turn.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from kvasir_chat.messages import ConversationRefusedError
from kvasir_chat.template import ChatTemplate
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError, ContextLengthError, InvalidRequestError
from kvasir_runtime.server.body import shown
from kvasir_runtime.server.protocol import ChatMessage, ChatPrompt, CompletionRequest
from kvasir_runtime.server.resolving import Limits, check_fits, check_token_ids, most_prompt_tokens

INLINE_CHARS = 8192
"""Shorter texts are tokenised on the event loop: about 2 ms, less than a thread's switch costs beside a busy core."""
INLINE_TOKENS = 4096
"""Of fewer, text is made there."""
INLINE_MESSAGES = 64
"""Shorter conversations, if their texts are short as well, are rendered there."""
NUM_RENDERERS = 2
"""Threads for the others, of their own: while they render they hold the interpreter's lock for 5 ms at a time, and
tokenising is not to wait for them."""
MAX_KEPT_CHARS = 2**16
"""Of a conversation's text, while it is answered: more than a thought that the client has begun."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str
    """As the client sent it; of token ids what they stand for, where it is to be echoed, else nothing; of messages the
    end of what the chat template made."""


class PromptBuilder:
    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._renderers = ThreadPoolExecutor(NUM_RENDERERS, thread_name_prefix="render")

    async def completion_prompts(self, wishes: CompletionRequest, limits: Limits) -> list[Prompt]:
        """One or several, from a text, a list of texts, token ids or a list of those."""
        contents = _split(wishes.prompt)
        _check_number(len(contents), wishes.num_candidates, limits)
        prompts = []
        for content in contents:
            prompts.append(await self._completion_prompt(content, wishes, limits))
            await asyncio.sleep(0)  # let others have their turn
        return prompts

    async def chat_prompt(self, chat: ChatPrompt, limits: Limits, most_tokens: int | None = None) -> Prompt:
        """Of `most_tokens` the last; None: all."""
        if _is_short(chat):
            text = self._render(chat)
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._renderers, self._render, chat)
        token_ids = await self.encode(text, chat.add_special_tokens, limits.max_model_len, "messages", most_tokens)
        if not token_ids:
            raise InvalidRequestError("messages: the chat template made an empty prompt of them", "messages")
        _check_vocabulary(token_ids, limits.vocab_size, "messages")
        return Prompt(token_ids, text[-MAX_KEPT_CHARS:])

    async def encode(
        self, text: str, add_special_tokens: bool, max_model_len: int, param: str, most_tokens: int | None = None
    ) -> list[int]:
        """Of `most_tokens` the last; else ContextLengthError is raised for a text that is certainly too long, before
        reading it.
        """
        longest = self._tokenizer.max_chars_per_token
        if most_tokens is not None:
            token_ids = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
            return token_ids[-most_tokens:]
        if longest is not None and len(text) > max_model_len * longest:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which is at least {-(-len(text) // longest)} tokens, but the "
                f"model's context is {max_model_len} tokens; shorten the prompt",
                param,
            )
        if len(text) <= INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def _completion_prompt(self, content: object, wishes: CompletionRequest, limits: Limits) -> Prompt:
        most = most_prompt_tokens(wishes, limits.max_model_len)
        if isinstance(content, str):
            token_ids = await self.encode(content, wishes.add_special_tokens, limits.max_model_len, "prompt", most)
            _check_vocabulary(token_ids, limits.vocab_size, "prompt")
            is_cut = wishes.echo and len(token_ids) == most
            prompt = Prompt(token_ids, await of_tokens(self._tokenizer.decode, token_ids) if is_cut else content)
        elif isinstance(content, list):
            content = content if most is None else content[-most:]
            check_fits(len(content), limits.max_model_len, "prompt")
            if not _are_token_ids(content):
                raise _wrong_prompt(content)
            check_token_ids(content, limits.vocab_size, "prompt")
            prompt = Prompt(content, await of_tokens(self._tokenizer.decode, content) if wishes.echo else "")
        else:
            raise _wrong_prompt(content)
        if not prompt.token_ids:
            raise InvalidRequestError("prompt: it is empty, but at least one token is needed to go on", "prompt")
        return prompt

    def _render(self, chat: ChatPrompt) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template, so it cannot take messages; use /v1/completions, or start the server "
                "with --chat-template",
                "messages",
            )
        try:
            return self._chat_template.render(
                [message.model_dump(exclude_none=True) for message in chat.messages],
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=[tool.sent for tool in chat.tools] if chat.tools else None,
                documents=chat.documents,
                reasoning_effort=chat.reasoning_effort,
                variables=chat.chat_template_kwargs,
            )
        except ConversationRefusedError as error:
            raise InvalidRequestError(str(error), error.field) from error


def translated(make: Callable[[], T]) -> T:
    """What is made of a conversation. Raises InvalidRequestError where that is refused."""
    try:
        return make()
    except ConversationRefusedError as error:
        raise InvalidRequestError(str(error), error.field) from error


async def of_tokens(make: Callable[[list[int]], T], token_ids: list[int]) -> T:
    """What is made of tokens; of many it is made in a thread."""
    return make(token_ids) if len(token_ids) <= INLINE_TOKENS else await asyncio.to_thread(make, token_ids)


def _split(prompt: Any) -> Sequence[object]:
    """The prompts of a request, told apart by the first element alone."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        kind = type(prompt[0])
        if kind is int:
            return [prompt]
        if kind in (str, list):
            return prompt
    raise _wrong_prompt(prompt)


def _check_number(num_prompts: int, num_candidates: int, limits: Limits) -> None:
    if num_prompts * num_candidates > limits.max_sequences:
        each = "" if num_candidates == 1 else f" in {num_candidates} sequences each"
        raise InvalidRequestError(
            f"prompt: {num_prompts} prompts were given{each}, but this server makes at most {limits.max_sequences} "
            "sequences a request (--max-request-sequences); send several requests",
            "prompt",
        )


def _check_vocabulary(token_ids: list[int], vocab_size: int, param: str) -> None:
    """The tokenizer may know more tokens than the model has embeddings for."""
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(
            f"{param}: the tokenizer makes token id {max(token_ids)} of this text, but the model's ids end at "
            f"{vocab_size - 1}; leave out the special text that it stands for",
            param,
        )


def _wrong_prompt(prompt: Any) -> InvalidRequestError:
    seen = "nothing" if prompt is None else shown(prompt[:8] if isinstance(prompt, list) else prompt)
    return InvalidRequestError(
        f"prompt: {seen} was given, but it should be a text, a list of texts, a list of token ids or a list of those, "
        "and not empty",
        "prompt",
    )


def _are_token_ids(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}


def _is_short(chat: ChatPrompt) -> bool:
    """Whether rendering takes no longer than a thread's switch, judged without reading what is rendered."""
    variables = chat.chat_template_kwargs or {}
    if chat.tools or chat.documents or any(message.tool_calls for message in chat.messages):  # arguments are parsed
        return False
    if any(isinstance(value, list | dict) for value in variables.values()):  # templates loop over them
        return False
    texts = [*variables, *(value for value in variables.values() if isinstance(value, str))]
    texts.append(chat.reasoning_effort or "")
    num_chars = sum(map(len, texts)) + sum(map(_num_chars, chat.messages))
    return num_chars <= INLINE_CHARS and len(chat.messages) <= INLINE_MESSAGES


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    num_chars = len(content) if isinstance(content, str) else sum(1 + len(part.text) for part in content)
    others = (message.name, message.tool_call_id, message.reasoning_content, message.reasoning)
    return num_chars + sum(len(text) for text in others if text)


TEMPLATE_FOLDER = "additional_chat_templates"


def load_chat_template(folder: Path, tokenizer: Tokenizer, file: Path | None) -> ChatTemplate | None:
    """The given file, else the checkpoint's own template, of several the one that is its default; None where it has
    none. Raises ConfigurationError.
    """
    sources = {"default": _read(file)} if file is not None else _templates(folder, tokenizer.settings)
    source = sources.get("default", next(iter(sources.values()), None))
    try:
        return None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"the chat template is no valid Jinja, line {error.lineno}: {error.message}"
        ) from error


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name, from where transformers looks for them: files first, then tokenizer_config.json."""
    files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if os.path.lexists(own := folder / "chat_template.jinja"):
        files["default"] = own
    if files:
        return {name: _read(file) for name, file in files.items()}
    given = settings.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        given = {each.get("name"): each.get("template") for each in given}
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(source, str) for source in given.values()):
        raise ConfigurationError(
            "chat_template in tokenizer_config.json is neither a text nor texts by name; correct it or give another "
            "with --chat-template"
        )
    return given


def _read(file: Path) -> str:
    """Without an editor's byte order mark, which no model was trained on."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the chat template {file} cannot be read: {error}") from error
