"""How the served model writes calls and thoughts: what a flag names, else what its chat template shows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.talk.detection import detect_calls, detect_reasoning
from kvasir_runtime.talk.format import CallFormat, Channels, ReasoningFormat
from kvasir_runtime.talk.formats import FORMATS, REASONING

NO_FORMAT = "none"
"""In the place of a format's name."""
_SHOWN_BY = "shown_by"


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
    """The named ones, else those that the chat template shows. Raises ConfigurationError."""
    shown = template or ""
    calls_name = _chosen("--tool-call-parser", calls_name, list(FORMATS), detect_calls(shown))
    reasoning_name = _chosen("--reasoning-parser", reasoning_name, list(REASONING), detect_reasoning(shown))
    calls = None if calls_name is None else FORMATS[calls_name]
    reasoning = None if reasoning_name is None else REASONING[reasoning_name]
    return AnswerFormats(
        calls_name=calls_name,
        calls=calls,
        special_call_ids=_special_ids(tokenizer, calls),
        reasoning=reasoning,
        special_reasoning_ids=_special_ids(tokenizer, reasoning),
        reasoning_token_ids=_token_ids(tokenizer, reasoning),
        special_ids={tokenizer.token(token_id): token_id for token_id in tokenizer.special_ids},
    )


def _chosen(flag: str, name: str | None, known: Sequence[str], detected: str | None) -> str | None:
    if name is None:
        return detected
    if name == NO_FORMAT:
        return None
    if name not in known:
        raise ConfigurationError(f"{flag} is {name!r}; known are {', '.join([*known, NO_FORMAT])}")
    return name


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
