"""Of what a description of a model's talk is made. All of it is data: one parser reads every format."""

from dataclasses import dataclass

from kvasir_runtime.talk.literals import JSON, Brackets, Literals

Shown = tuple[tuple[str, ...], ...]
"""A chat template that has all the texts of one of these makes models talk so."""


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": NAME, "arguments": {...}}`, or `parameters`."""

    arguments_key: str = "arguments"
    """That models write."""


@dataclass(frozen=True, slots=True)
class Values:
    """Arguments that are one value, JSON or another spelling of it."""

    literals: Literals = JSON
    within: Brackets | None = None
    """None: any value; else what stands in these."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments one by one between marks, without quotes: the tool's schema says what is text. White space may stand
    between one's end and the next."""

    key_opened: tuple[str, ...]
    key_closed: tuple[str, ...]
    value_closed: tuple[str, ...]
    value_opened: tuple[str, ...] = ()
    """After the key's end."""
    string_key_closed: tuple[str, ...] = ()
    """The key ends so where the value is text, whatever the schema says."""
    json_key_closed: tuple[str, ...] = ()
    """The key ends so where the value is JSON."""
    has_python_words: bool = False
    """Models may write True, False and None for what JSON spells true, false and null."""
    has_newlines: bool = False
    """One newline after a value's beginning and one before its end belong to the marks."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The tool's name, then arguments."""

    arguments: Values | Parameters
    before: tuple[str, ...] = ("",)
    """One of these stands before the name."""
    after: tuple[str, ...] = ()
    """One of these ends the name; none: it ends where it ends."""
    until: tuple[str, ...] = ()
    """One of these must follow, and belongs to what follows."""
    closed: tuple[str, ...] = ()
    """Stands after the arguments."""
    is_numbered: bool = False
    """A colon and a number follow the name, and all of it with what stands before it is the call's id."""
    id_opened: tuple[str, ...] = ()
    """Here an id may follow the name."""
    needs: tuple[str, ...] = ()
    """Special tokens: a model whose vocabulary has them writes so, and no other."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls of tools: sections of calls, or calls by themselves. A list of bodies in `[...]` may stand for a body."""

    bodies: tuple[JsonCall | NamedCall, ...]
    """The first one that can be read counts; models write the first one whose needs are met."""
    opened: tuple[str, ...] = ()
    """Before each call."""
    closed: tuple[str, ...] = ()
    """As many where models write them, each for one that opens."""
    is_opened_optional: bool = False
    """Models leave the mark before a call out at times."""
    section_opened: tuple[str, ...] = ()
    """Before one call or several."""
    section_closed: tuple[str, ...] = ()
    between: str = ""
    """Characters that part calls, beside white space."""
    is_list: bool = False
    """Models write a list, even of one call."""
    bare: str = ""
    """Models write no marks. An answer that begins with one of these characters may be calls."""
    ends_thought: bool = False
    """A call within a thought ends it."""
    shown_by: Shown = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts at the beginning of an answer; newlines beside the marks belong to them."""

    opened: tuple[str, ...]
    closed: tuple[str, ...]
    is_anywhere: bool = False
    """A thought may begin anywhere."""
    shown_by: Shown = ()


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer is messages, each with a header that says to whom and on which channel: thoughts, text and calls alike.
    The prompt has begun the first header."""

    started: str
    channel: str
    constrained: str
    message: str
    ended: tuple[str, ...]
    reasoning: str
    """The channel of thoughts."""
    tool_prefix: str
    """Before the name of a tool that is the recipient."""
    shown_by: Shown = ()
