"""A model's vocabulary as grammars see it, and matchers, which follow a grammar through an answer.

Both are llguidance's (Earley's algorithm over derivatives of regular expressions): it works out which tokens are
allowed when it is asked, so a grammar is made in a millisecond and nothing is computed ahead for each.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.thought_budget import ThoughtCount, parted

MAX_KEPT_GRAMMARS = 128
ALL_ALLOWED = np.int32(-1)
"""A word of a mask."""
_SPECIAL = b"\xff"
"""Before the text of a special token: no text has this byte, so none matches it."""


def num_words(vocab_size: int) -> int:
    """Of a mask; the bit of an answer's end may need one more than the tokens' do."""
    return vocab_size // 32 + 1


def mask_of(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """That allows these tokens; ids outside the vocabulary are left out."""
    bits = np.zeros(32 * num_words(vocab_size), dtype=np.bool_)
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenTable(Protocol):
    """Of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    def token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class _Wrapped:
    """What llguidance asks of a tokenizer. One id more than the model has stands for the end of an answer: which
    tokens end one is a matter of each request."""

    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self._table = table
        known = range(min(table.vocab_size, vocab_size))
        tokens = [b"" if token_id in table.special_ids else table.token_bytes(token_id) for token_id in known]
        tokens += [b""] * (vocab_size + 1 - len(tokens))
        self.special_token_ids = [token_id for token_id, token in enumerate(tokens) if not token]
        self.tokens = [token or _SPECIAL + b"%d" % token_id for token_id, token in enumerate(tokens)]
        self.eos_token_id = vocab_size

    def __call__(self, text: str | bytes) -> list[int]:
        return self._table.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


class Matcher:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "Matcher":
        """Takes 0.7 us; to go on and come back with it takes a third of the time of llguidance's rollback."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def fault(self) -> str | None:
        """Why it cannot go on; None: it can."""
        return self._reason() if self._matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Whether no token may follow, only the end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of them, from the first, may follow."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def accept(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarError where they may not follow; then the matcher is of no more use."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(self._reason())

    def fill(self, words: NDArray[np.int32]) -> bool:
        """Write which tokens may follow, bit t % 32 of word t / 32, into int32 [num_words(vocab_size)]; whether the
        answer may end instead. Raises GrammarError where that takes more work than llguidance spends on a token."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._reason())
        word, bit = divmod(self._vocab_size, 32)
        end = np.uint32(1 << bit)
        unsigned = words.view(np.uint32)
        may_end = bool(unsigned[word] & end)
        unsigned[word] &= ~end
        return may_end

    def _reason(self) -> str:
        return str(self._matcher.get_error()).split("\n<state>")[0].strip() or "the grammar cannot be followed"


class CountingMatcher(Matcher):
    """Of a grammar whose thought may have so many tokens. That is told by masks alone: more of them would be valid."""

    def __init__(self, matcher: Any, vocab_size: int, vocabulary: "Vocabulary", count: ThoughtCount) -> None:
        super().__init__(matcher, vocab_size)
        self._vocabulary = vocabulary
        self._count = count

    def copy(self) -> "CountingMatcher":
        return CountingMatcher(self._matcher.deep_copy(), self._vocab_size, self._vocabulary, self._count.copy())

    def accept(self, token_ids: Sequence[int]) -> None:
        super().accept(token_ids)
        for token_id in token_ids:
            self._count.accept(token_id, self._vocabulary.token_bytes(token_id))

    def fill(self, words: NDArray[np.int32]) -> bool:
        may_end = super().fill(words)
        if not self._count.is_spent:
            return may_end
        closing = words & mask_of([self._closing_token()], self._vocab_size)
        if not closing.any():  # within a character
            return may_end
        words[:] = closing
        return False

    def _closing_token(self) -> int:
        closing_id = self._count.closing_id
        return self._vocabulary.first_token(self._count.closing_text) if closing_id is None else closing_id


class Vocabulary:
    """Of one tokenizer, for a model with so many logits. Several threads may make matchers."""

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        wrapped = llguidance.TokenizerWrapper(_Wrapped(table, vocab_size))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocab_size + 1)
        self._table = table
        self._vocab_size = vocab_size
        self._kept: OrderedDict[str, Matcher] = OrderedDict()
        self._keeping = Lock()

    def token_bytes(self, token_id: int) -> bytes:
        return _SPECIAL if token_id in self._table.special_ids else self._table.token_bytes(token_id)

    def first_token(self, text: str) -> int:
        """The longest that this begins with."""
        return self._tokenizer.greedy_tokenize(text)[0]

    def matcher(self, grammar: str) -> Matcher:
        """At the grammar's beginning. Raises GrammarError where it is none, or too large."""
        with self._keeping:
            kept = self._kept.pop(grammar, None)
        if kept is None:
            kept = self._made(grammar)
            if (fault := kept.fault) is not None:
                raise GrammarError(fault)
        with self._keeping:
            self._kept[grammar] = kept
            while len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return kept.copy()

    def fault_of(self, grammar: str) -> str | None:
        """Why it is none, or too large; None: it is one. Nothing of it is kept."""
        try:
            return self._made(grammar).fault
        except ValueError as error:  # of what is no Unicode
            return str(error)

    def _made(self, grammar: str) -> Matcher:
        budget, plain = parted(grammar)
        made = llguidance.LLMatcher(self._tokenizer, plain, log_level=0)
        if budget is None:
            return Matcher(made, self._vocab_size)
        return CountingMatcher(made, self._vocab_size, self, ThoughtCount(budget))
