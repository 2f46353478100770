"""A rank's vocabulary, and matchers that are made ahead of the steps that want them."""

from threading import Event
from typing import Any, cast

import pytest

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.execution.worker import AwaitedVocabulary
from kvasir_runtime.structured.vocabulary import Vocabulary


class Making:
    """A vocabulary of which one grammar takes its time, and one is none."""

    def __init__(self) -> None:
        self.may_end = Event()
        self.made: list[str] = []

    def matcher(self, grammar: str) -> Any:
        if grammar == "slow":
            assert self.may_end.wait(10)
        if grammar == "none":
            raise GrammarError("it is none")
        self.made.append(grammar)


def test_a_grammar_that_takes_long_holds_up_no_other() -> None:
    making = Making()
    vocabulary = AwaitedVocabulary(lambda: cast(Vocabulary, making))
    slow, none, quick = (vocabulary.prepare(grammar) for grammar in ("slow", "none", "quick"))
    vocabulary.begin()
    for each in (none, quick):
        each.result(10)
    assert (slow.done(), making.made) == (False, ["quick"])
    making.may_end.set()
    slow.result(10)
    assert making.made == ["quick", "slow"]


def test_without_a_vocabulary_nothing_waits() -> None:
    vocabulary = AwaitedVocabulary(None)
    vocabulary.begin()
    vocabulary.prepare("any").result(10)
    with pytest.raises(GrammarError, match="without a vocabulary"):
        vocabulary()
