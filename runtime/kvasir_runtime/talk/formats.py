"""How models write calls of tools and thoughts: descriptions that one parser reads, by vLLM's names."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": ..., "arguments": {...}}`, or a list of such."""


Body = JsonCall


@dataclass(frozen=True, slots=True)
class CallFormat:
    bodies: tuple[Body, ...]
    """The first one that can be read counts."""
    opened: tuple[str, ...] = ()
    """Marks before a call; none: a call stands bare."""
    closed: tuple[str, ...] = ()
    section_opened: tuple[str, ...] = ()
    """Marks before a call, or before several."""
    section_closed: tuple[str, ...] = ()
    between: str = ""
    """Characters that part calls, beside white space."""
    bare: str = ""
    """An answer that begins with one of these characters may be a call without any mark."""
    ends_thought: bool = False
    """A call within a thought ends it."""
    shown_by: tuple[tuple[str, ...], ...] = ()
    """A chat template with all the texts of one of these makes models write so."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    opened: str
    closed: str
    shown_by: tuple[tuple[str, ...], ...] = ()


HERMES: Final = CallFormat(
    (JsonCall(),), ("<tool_call>",), ("</tool_call>",), shown_by=(("<tool_call>", '"arguments"'),)
)

FORMATS: Final[dict[str, CallFormat]] = {"hermes": HERMES, "qwen3_json": HERMES}
"""`--tool-call-parser`"""

THINK: Final = ReasoningFormat("<think>", "</think>", shown_by=(("<think>",), ("</think>",)))

REASONING: Final[dict[str, ReasoningFormat]] = {"qwen3": THINK, "deepseek_r1": THINK}
"""`--reasoning-parser`"""
