"""From what a client sends as prompt (text, token ids, messages) to token ids that the model knows.

No request holds up the streams of the others: how many prompts there are and how long each is comes before what is in
them, long texts are tokenised and long conversations rendered in a thread, and between prompts others get their turn.

A conversation becomes the text that a model was trained on through the model's own Jinja template. Templates see what
transformers shows them (chat templates are written against it): the same block trimming, the same filters and
functions. They run in Jinja's immutable sandbox, because they come with the checkpoint.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError, ContextLengthError, InvalidRequestError
from kvasir_runtime.server.protocol import ChatMessage, ChatPrompt, CompletionRequest
from kvasir_runtime.server.resolving import Limits, check_fits, check_token_ids

Message = dict[str, Any]

CONTINUE_MARK = "\N{SYMBOL FOR UNIT SEPARATOR}kvasir-continue\N{SYMBOL FOR UNIT SEPARATOR}"
"""Put behind the content to find where it ends in the prompt; a space behind it shows whether the template trims."""
MAX_RENDER_SECONDS = 10.0
"""Of a processor. A conversation of a million tokens takes less than one; others wait for what takes longer."""
MAX_RENDERED_CHARS = 2**26
"""More than any context holds. A template may print a variable of the client's with every message."""
MAX_SHOWN_ERROR = 500  # characters of what a template says, which may repeat what the client sent
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


class ChatTemplate:
    """A compiled template and the special tokens (`bos_token`, ...) that it may print."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], *,
        max_chars: int = MAX_RENDERED_CHARS, max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:  # fmt: skip
        """Raises ConfigurationError when the source is not a Jinja template."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigurationError(f"the chat template is no valid Jinja, line {error.lineno}: {error}") from error
        self._special_tokens = special_tokens
        self._max_chars = max_chars
        self._max_seconds = max_seconds

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """With `continue_final_message` the text ends where the last message's content ends.

        Raises InvalidRequestError when the template refuses the messages, with the template's own words.
        """
        if reserved := RESERVED_VARIABLES & variables.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(reserved))}; the request's own fields do",
                "chat_template_kwargs",
            )
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables)
        *earlier, last = messages
        marked = {**last, "content": (last.get("content") or "") + CONTINUE_MARK + " "}
        text, mark, rest = self._render([*earlier, marked], False, variables).rpartition(CONTINUE_MARK)
        if not mark:
            raise InvalidRequestError(
                "the model's chat template does not print the last message's content, so it cannot be continued; "
                "send the request without continue_final_message",
                "continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        context = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
            **variables,
        }
        parts: list[str] = []
        num_chars, end = 0, time.thread_time() + self._max_seconds
        try:
            for part in self._template.generate(context):
                parts.append(part)
                num_chars += len(part)
                if num_chars > self._max_chars or time.thread_time() > end:
                    break
            else:
                return "".join(parts)
        except Exception as error:  # a program of the model's maker on a client's values: anything may be wrong
            message = f"the model's chat template refuses these messages: {str(error)[:MAX_SHOWN_ERROR]}"
            raise InvalidRequestError(message, "messages") from error
        raise InvalidRequestError(
            f"the model's chat template made {num_chars} characters of these messages and was not at their end, but at "
            f"most {self._max_chars} in {self._max_seconds:g} seconds are made of a request; send fewer messages, "
            "or less in chat_template_kwargs and tool_calls",
            "messages",
        )


def load_chat_template(
    folder: Path, settings: dict[str, Any], special_tokens: dict[str, str], file: Path | None
) -> ChatTemplate | None:
    """The given file, else the checkpoint's own template; None where it has none.

    `settings` is tokenizer_config.json, which may hold one template or a list of named ones.
    """
    if file is not None:
        return ChatTemplate(_read(file), special_tokens)
    if (own := folder / "chat_template.jinja").exists():
        return ChatTemplate(_read(own), special_tokens)
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return None if source is None else ChatTemplate(source, special_tokens)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the chat template {file} cannot be read: {error}") from error


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)


INLINE_CHARS = 8192
"""Shorter texts are tokenised on the event loop: about 2 ms, less than a thread's switch costs beside a busy core."""
INLINE_TOKENS = 4096
"""Of fewer, text is made there."""
INLINE_MESSAGES = 64
"""Shorter conversations, if their texts are short as well, are rendered there."""
NUM_RENDERERS = 2
"""Threads for the others, of their own: while they render they hold the interpreter's lock for 5 ms at a time, and
tokenising is not to wait for them."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str
    """As the client sent it; of token ids what they stand for, where it is to be echoed, else nothing."""


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

    async def chat_prompt(self, chat: ChatPrompt, limits: Limits) -> list[int]:
        render = self._renderer(chat)
        if _is_short(chat):
            text = render()
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._renderers, render)
        token_ids = await self.encode(text, chat.add_special_tokens, limits.max_model_len, "messages")
        if not token_ids:
            raise InvalidRequestError("messages: the chat template made an empty prompt of them", "messages")
        _check_vocabulary(token_ids, limits.vocab_size, "messages")
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

    async def _completion_prompt(self, content: object, wishes: CompletionRequest, limits: Limits) -> Prompt:
        if isinstance(content, str):
            token_ids = await self.encode(content, wishes.add_special_tokens, limits.max_model_len, "prompt")
            _check_vocabulary(token_ids, limits.vocab_size, "prompt")
            prompt = Prompt(token_ids, content)
        elif isinstance(content, list):
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

    def _renderer(self, chat: ChatPrompt) -> Callable[[], str]:
        if (template := self._chat_template) is None:
            raise InvalidRequestError(
                "the model has no chat template, so it cannot take messages; use /v1/completions, or start the server "
                "with --chat-template",
                "messages",
            )
        add_generation_prompt = chat.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not chat.continue_final_message

        def render() -> str:
            return template.render(
                [_template_message(message, index) for index, message in enumerate(chat.messages)],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                variables=chat.chat_template_kwargs or {},
            )

        return render


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
    seen = "nothing" if prompt is None else repr(prompt[:8] if isinstance(prompt, list) else prompt)[:80]
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
    if any(message.tool_calls for message in chat.messages):  # their arguments are parsed
        return False
    if any(isinstance(value, list | dict) for value in variables.values()):  # templates loop over them
        return False
    texts = [*variables, *(value for value in variables.values() if isinstance(value, str))]
    num_chars = sum(map(len, texts)) + sum(map(_num_chars, chat.messages))
    return num_chars <= INLINE_CHARS and len(chat.messages) <= INLINE_MESSAGES


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    num_chars = len(content) if isinstance(content, str) else sum(1 + len(part.text) for part in content)
    others = (message.name, message.tool_call_id, message.reasoning_content, message.reasoning)
    return num_chars + sum(len(text) for text in others if text)


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
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        field = f"messages[{index}].tool_calls"
        raise InvalidRequestError(f"{field}: a call's arguments are not valid JSON: {error}", field) from error
    return {**call, "function": {**function, "arguments": arguments}}
