"""Grammars of answers behind what a model thinks first, and of thoughts that end in time.

No text matches a special token; other marks that are one token are named by it, so that a thought's text has no closing
mark in pieces.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from kvasir_runtime.structured.grammars import composed, named_parts
from kvasir_runtime.structured.thought_budget import ThoughtBudget

_LINES = r"/\n{1,2}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What stands before an answer. Text, in which `token_ids` names the tokens."""

    opened: str
    closed: str
    is_open: bool
    """The prompt has opened it, so it comes first and is closed; else there may be one."""
    behind: str = ""
    """Stands behind a thought that there is."""
    is_optional: bool = True
    """Where none is open, there may be none."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Of marks that are one token."""
    max_tokens: int | None = None
    """Of the thought; None: any number."""


def behind_a_thought(answer: str | None, thought: Thought, special_ids: Collection[int] = ()) -> str:
    """The grammar of all that is written, whose answer follows one; None: it may be anything, special tokens included.
    A thought and an answer have at most two line ends between them. Raises GrammarError.
    """
    rules = list(_thought_rules(thought))
    if thought.is_open:
        start = "thought"
    else:
        start = f"({spelled(thought.opened, thought.token_ids)} thought){'?' if thought.is_optional else ''}"
    if answer is None:
        rest, others = "rest", list[dict[str, Any]]()
        rules += _rest_rules(thought, special_ids)
    else:
        rest, others = named_parts("answer", answer)
    rules.insert(0, f"start: {start} {rest}")
    grammar = composed("\n".join(rules), others)
    return grammar if thought.max_tokens is None else _budget(thought, thought.max_tokens).beside(grammar)


def _budget(thought: Thought, max_tokens: int) -> ThoughtBudget:
    return ThoughtBudget(
        max_tokens=max_tokens,
        opened=None if thought.is_open else thought.opened,
        closed=thought.closed,
        token_ids={mark: i for mark, i in thought.token_ids.items() if mark in thought.opened + thought.closed},
    )


def _thought_rules(thought: Thought) -> Iterator[str]:
    closed = spelled(thought.closed, thought.token_ids)
    behind = f"({_LINES})? {spelled(thought.behind, thought.token_ids)}"
    if thought.closed not in thought.token_ids:
        yield f"thought: text {behind}"
        yield f"text[suffix={closed}]: /(?s:.*)/"
        return
    yield f"thought: TEXT {closed} {behind}"
    yield f"TEXT: /(?s:.*)/ & ~/(?s:.*{_as_regex(thought.closed)}.*)/"


def _rest_rules(thought: Thought, special_ids: Collection[int]) -> Iterator[str]:
    """Anything that is no thought: no text that begins one, and behind a special token no name of one."""
    yield rf"FIRST: /(?s:.+)/ & ~/(?s:\s*{_as_regex(thought.opened)}.*)/"
    mark, *names = _pieces(thought.opened, thought.token_ids)
    opening_id = thought.token_ids.get(mark)
    others = ",".join(_ranges({*special_ids} - {opening_id}))
    pieces = [f"<[{others}]> /(?s:.+)/?"] if others else []
    if names and opening_id in special_ids:
        pieces.append(f"<[{opening_id}]> OTHER?")
        yield rf"OTHER: /(?s:.+)/ & ~/(?s:\s*{_as_regex(names[0])}.*)/"
    yield f"rest: FIRST? ({' | '.join(pieces)})*" if pieces else "rest: FIRST?"


def _ranges(token_ids: Collection[int]) -> Iterator[str]:
    """As a Lark grammar has them."""
    numbered = enumerate(sorted(token_ids))
    for _, run in groupby(numbered, lambda pair: pair[1] - pair[0]):
        ids = [token_id for _, token_id in run]
        yield f"{ids[0]}-{ids[-1]}"


def behind_marks(marks: str, answer: str, token_ids: Mapping[str, int]) -> str:
    """The same grammar, of what comes behind these."""
    reference, parts = named_parts("answer", answer)
    return composed(f"start: {spelled(marks, token_ids)} {reference}", parts)


def spelled(text: str, token_ids: Mapping[str, int]) -> str:
    """As a Lark grammar has it."""
    return " ".join(
        f"<[{token_ids[piece]}]>" if piece in token_ids else json.dumps(piece, ensure_ascii=False)
        for piece in _pieces(text, token_ids)
    )


def _pieces(text: str, token_ids: Mapping[str, int]) -> list[str]:
    """Marks that are one token, and text between them."""
    names = sorted(token_ids, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return [piece for piece in pieces if piece]


def _as_regex(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
