"""A conversation to the prompt text that a model was trained on, through the model's own Jinja template.

Templates see what transformers shows them (chat templates are written against it): the same block trimming, the same
filters and functions. They run in Jinja's immutable sandbox, because they come with the checkpoint.
"""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvasir_runtime.errors import ConfigurationError, InvalidRequestError

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
