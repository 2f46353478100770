"""How the served model writes calls and thoughts: what a flag names, else what its chat template shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeVar

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.talk.detection import detect_calls, detect_reasoning
from kvasir_runtime.talk.format import CallFormat, Channels, ReasoningFormat
from kvasir_runtime.talk.formats import FORMATS, REASONING
from kvasir_runtime.talk.response_template import calls_of, reasoning_of

NO_FORMAT = "none"
"""In the place of a format's name."""
OWN_FORMAT = "hf"
"""The name of what a checkpoint describes itself (transformers' `response_template`)."""
_SHOWN_BY = "shown_by"
Format = TypeVar("Format")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """None: not known, or the model writes none."""

    calls_name: str | None = None
    calls: CallFormat | Channels | None = None
    special_call_ids: frozenset[int] = frozenset()
    """Of special tokens that its marks are made of."""
    reasoning: ReasoningFormat | Channels | None = None
    special_reasoning_ids: frozenset[int] = frozenset()
    reasoning_token_ids: Mapping[str, int] = field(default_factory=dict)
    """Of its marks that are one token."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Of all special tokens, by their text."""


def answer_formats(
    tokenizer: Tokenizer, template: str | None, calls_name: str | None, reasoning_name: str | None
) -> AnswerFormats:
    """The named ones, else those that the chat template shows, else those that the checkpoint describes. Raises
    ConfigurationError.
    """
    shown, described = template or "", tokenizer.settings.get("response_template")
    calls_name, calls = _chosen("--tool-call-parser", calls_name, FORMATS, detect_calls(shown), calls_of(described))
    _, reasoning = _chosen(
        "--reasoning-parser", reasoning_name, REASONING, detect_reasoning(shown), reasoning_of(described)
    )
    return AnswerFormats(
        calls_name=calls_name,
        calls=calls,
        special_call_ids=_special_ids(tokenizer, calls),
        reasoning=reasoning,
        special_reasoning_ids=_special_ids(tokenizer, reasoning),
        reasoning_token_ids=_token_ids(tokenizer, reasoning),
        special_ids={tokenizer.token(token_id): token_id for token_id in tokenizer.special_ids},
    )


def _chosen(
    flag: str, name: str | None, known: Mapping[str, Format], detected: str | None, described: Format | None
) -> tuple[str | None, Format | None]:
    """A format and its name."""
    if described is not None:
        known, detected = {**known, OWN_FORMAT: described}, detected or OWN_FORMAT
    name = detected if name is None else name
    if name is None or name == NO_FORMAT:
        return None, None
    if name not in known:
        raise ConfigurationError(f"{flag} is {name!r}; known are {', '.join([*known, NO_FORMAT])}")
    return name, known[name]


def _special_ids(tokenizer: Tokenizer, described: CallFormat | ReasoningFormat | Channels | None) -> frozenset[int]:
    """Of the special tokens in a format's marks."""
    texts = list(_texts(described))
    tokens = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_ids}
    return frozenset(i for i, token in tokens.items() if token and any(token in text for text in texts))


def _token_ids(tokenizer: Tokenizer, described: ReasoningFormat | Channels | None) -> dict[str, int]:
    encoded = {text: tokenizer.encode(text, add_special_tokens=False) for text in _texts(described) if len(text) > 1}
    return {text: token_ids[0] for text, token_ids in encoded.items() if len(token_ids) == 1}


def _texts(described: object) -> Iterator[str]:
    """That a description has anywhere."""
    if isinstance(described, str):
        yield described
    elif isinstance(described, tuple):
        for each in described:
            yield from _texts(each)
    elif is_dataclass(described):
        for part in fields(described):
            if part.name != _SHOWN_BY:
                yield from _texts(getattr(described, part.name))
