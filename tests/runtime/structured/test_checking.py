"""Grammars that would take for ever end with the process that tries them."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.runtime.cli.conftest import children_of

from kvasir_runtime.errors import GrammarError, ServerUnavailableError
from kvasir_runtime.structured.checking import MAX_PROCESSOR_SECONDS, GrammarChecker
from kvasir_runtime.structured.grammars import choice_grammar, regex_grammar
from kvasir_runtime.structured.json_schema import json_schema_grammar

FOR_EVER = {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(20, 60)]}
MANY_VALUES = {"enum": [{"a": number, "b": [number]} for number in range(10_000)]}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(vocab_size=1000)
    yield checker
    checker.close()


@pytest.mark.parametrize("grammar", [
    json_schema_grammar({"type": "object"}), regex_grammar("é{1,1000}"), choice_grammar(["a", "b"]), "start: <[999]>",
])  # fmt: skip
def test_a_grammar_passes(checker: GrammarChecker, grammar: str) -> None:
    checker.check(grammar)


@pytest.mark.parametrize(("grammar", "words"), [
    ("start: foo", "unknown name"),
    ("start: <[2000]>", "2000"),
    (json_schema_grammar({"not": {}}), "Unsatisfiable"),
    (choice_grammar([f"{number} {'x' * 100}" for number in range(4096)]).replace("start", "other"), "start"),
])  # fmt: skip
def test_what_is_wrong_is_told(checker: GrammarChecker, grammar: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words.replace("[", r"\[")):
        checker.check(grammar)


@pytest.mark.parametrize("schema", [FOR_EVER, MANY_VALUES], ids=["intersection", "values"])
def test_one_that_would_take_long_is_refused_and_the_next_passes(checker: GrammarChecker, schema: object) -> None:
    with pytest.raises(GrammarError, match=f"more than {MAX_PROCESSOR_SECONDS:g} s or"):
        checker.check(json_schema_grammar(schema))
    checker.check(json_schema_grammar({"type": "object"}))


def test_the_caller_goes_on_meanwhile(checker: GrammarChecker) -> None:
    begin = time.process_time()
    with pytest.raises(GrammarError, match="more than"):
        checker.check(json_schema_grammar(FOR_EVER))
    assert time.process_time() - begin < 0.5


def test_a_child_that_others_kill_says_nothing_of_the_grammar() -> None:
    grammar, before = json_schema_grammar({"type": "object"}), set(children_of(os.getpid()))
    checker = GrammarChecker(vocab_size=1000)
    checker.check(grammar)
    (child,) = set(children_of(os.getpid())) - before
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ServerUnavailableError, match="ask again"):
        checker.check(grammar)
    checker.check(grammar)
    checker.close()
