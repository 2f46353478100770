"""How many tokens a thought may have: once they are spent, only its closing mark may follow.

llguidance ends a text that has its number of tokens without a mark, or forbids the mark until then. So what is counted
stands beside the grammar, in its text, and is followed beside its matcher.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_KEY = "thought_budget"
_HEAD = json.dumps({_KEY: None}).removesuffix("null}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    max_tokens: int
    opened: str | None
    """The mark before the thought, with which the answer begins. None: the prompt has it."""
    closed: str
    token_ids: Mapping[str, int]
    """Of marks that are one token."""

    def beside(self, grammar: str) -> str:
        """The grammar's text with this."""
        return json.dumps({_KEY: asdict(self), "grammar": grammar}, ensure_ascii=False)


def parted(grammar: str) -> tuple[ThoughtBudget | None, str]:
    """What is counted, if anything is, and the grammar's text without it."""
    if not grammar.startswith(_HEAD):
        return None, grammar
    read = json.loads(grammar)
    return ThoughtBudget(**read[_KEY]), read["grammar"]


class ThoughtCount:
    """Where an answer stands in its thought."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._names = {token_id: mark.encode() for mark, token_id in budget.token_ids.items()}
        self._opened, self._closed = (budget.opened or "").encode(), budget.closed.encode()
        self._text = b""
        """All of it before the thought; within, as much as may be the beginning of its closing mark."""
        self._num_tokens: int | None = 0 if budget.opened is None else None
        """Of the thought; None: it has not begun."""
        self._is_over = False

    def copy(self) -> "ThoughtCount":
        copied = object.__new__(ThoughtCount)
        copied.__dict__.update(self.__dict__)
        return copied

    def accept(self, token_id: int, text: bytes) -> None:
        """`text`: of the token, where it is not one of the budget's marks."""
        if self._is_over:
            return
        self._text += self._names.get(token_id, text)
        if self._num_tokens is not None:
            self._num_tokens += 1
        elif self._text.startswith(self._opened):
            self._text = self._text[len(self._opened) :]
            self._num_tokens = int(bool(self._text))
        else:
            self._is_over = not self._opened.startswith(self._text)
            return
        self._is_over = self._closed in self._text
        self._text = self._text[-len(self._closed) :]

    @property
    def is_spent(self) -> bool:
        return not self._is_over and self._num_tokens is not None and self._num_tokens >= self._budget.max_tokens

    @property
    def closing_id(self) -> int | None:
        """The closing mark where it is one token."""
        return self._budget.token_ids.get(self._budget.closed)

    @property
    def closing_text(self) -> str:
        """What is missing of a closing mark that is several."""
        mark = self._budget.closed
        begun = next(n for n in range(len(mark) - 1, -1, -1) if self._text.endswith(mark[:n].encode()))
        return mark[begun:]
