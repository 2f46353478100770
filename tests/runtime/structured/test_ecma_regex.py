"""Patterns as JSON Schema has them, beside Python's `re` where that reads them as ECMA-262 does."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.ecma_regex import rust_pattern
from kvasir_runtime.structured.json_schema import json_schema_grammar
from kvasir_runtime.structured.vocabulary import Vocabulary

BYTES = Vocabulary(ByteTable(), VOCAB_SIZE)
CHARACTERS = "aBz09_-^]}[{&~,. \n\r\u2028\x1c\x85\ufeffé٣😀²"


def follows(pattern: str, text: str) -> bool:
    matcher = BYTES.matcher(json_schema_grammar({"type": "string", "pattern": pattern}))
    answer = json.dumps(text, ensure_ascii=False).encode()
    return matcher.num_valid(list(answer)) == len(answer)


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"^[[]$", "[", "]a"),
        (r"^[a&&b]$", "a&b", "c"),
        (r"^[a~~b]$", "a~b", "c"),
        (r"^[[:alp]$", "[:alp", "e"),
        (r"^[[:alpha:]x]$", "", ["a", "x"]),
        (r"^[[:alpha:]]$", ["a]", ":]"], ["a", "b]"]),
        (r"^[\w-.]$", "-.a", "é"),
        (r"^[a\]b]$", "a]b", "\\"),
        (r"^[^]$", "a\n]", ""),
        (r"^[^\w]$", "-&😀", "aé٣²_"),
        (r"^[^\W]$", "a_", "é-"),
        (r"^\W$", "-&😀", "aé²"),
        (r"^\w$", "a_9", "é²-"),
        (r"^\D$", "a", "9٣"),
        (r"^\d$", "9", "٣"),
        (r"^\s$", " \n\u2028", "\x1c\x85\ufeff"),
        (r"^\S$", "a", " \x1c\x85\ufeff"),
        (r"^[\s\S]$", "a \n", "\x1c"),
        (r"^.$", "a-😀", "\n\r\u2028"),
        (r"^{a}$", ["{a}"], "a"),
        (r"^a{b}$", ["a{b}"], ["ab"]),
        (r"^a{2,3}$", ["aa", "aaa"], ["a", "aaaa"]),
        (r"^a}]$", ["a}]"], ["a"]),
        (r"^\cA\cz$", ["\x01\x1a"], ["cA"]),
        (r"^\x41\u0042\u{1F600}$", ["AB😀"], ["AB"]),
        (r"^\uD83D\uDE00$", "😀", "a"),
        (r"^[\uD83D\uDE00-\uD83D\uDE4F]$", "😀", "a"),
        (r"^[a\uD800-\uDFFFb]$", "ab", "c"),
        (r"^\/\-\^\$\.$", ["/-^$."], ["/"]),
        (r"^(?<year>\d\d)$", ["19"], ["1"]),
        (r"^\p{Lu}[\p{Lu}_]$", ["É_"], ["é_"]),
        (r"^(?i:ab)$", ["aB"], ["b"]),
        (r"^[\b]\0$", ["\b\0"], ["b0"]),
    ],
)
def test_a_pattern_means_what_ecma_262_says(pattern: str, matches: str | list[str], others: str | list[str]) -> None:
    assert [text for text in matches if not follows(pattern, text)] == []
    assert [text for text in others if follows(pattern, text)] == []


@pytest.mark.parametrize(
    ("pattern", "part", "why"),
    [
        ("a(?=b)", "(?=", "look-around"),
        ("(?<!b)a", "(?<!", "look-around"),
        (r"(a)\1", r"\\1", "what a group matched"),
        (r"(?<n>a)\k<n>", r"\\k", "what a group matched"),
        (r"\bword", r"\\b", "boundaries of words"),
        ("a{,3}", "{,3}", "write {0,n}"),
        ("[]a]", "[]", "nothing matches it"),
        ("[b-a]", "[b-a", "goes backwards"),
        ("[ab", "[ab", "has no end"),
        ("(?x)a", "(?x)", "no such group"),
        (r"a\z", r"\\z", "no such escape"),
        (r"\u12", r"\\u", "no such escape"),
        (r"\uD800", r"\\uD800", "half of a character"),
        (r"\u{110000}", r"\\u{110000}", "no character has that number"),
        ("a\\", r"\\", "nothing follows it"),
    ],
)
@pytest.mark.parametrize("keyword", ["pattern", "patternProperties", "propertyNames"])
def test_what_cannot_be_followed_is_named_with_its_place(keyword: str, pattern: str, part: str, why: str) -> None:
    values = {"patternProperties": {pattern: True}, "propertyNames": {"pattern": pattern}}
    schema = {"type": "object", "properties": {"x": {keyword: values.get(keyword, pattern)}}}
    with pytest.raises(GrammarError) as refused:
        json_schema_grammar(schema)
    told = str(refused.value)
    assert told.startswith(f"'{keyword}' at /properties/x of the schema cannot be promised: '{part}' in ")
    assert why in told


def test_properties_of_patterns_that_are_one_in_rust_follow_both() -> None:
    schemas = {r"^\x31$": {"type": "integer"}, r"^\u0031$": {"maximum": 5}}
    matcher = BYTES.matcher(json_schema_grammar({"type": "object", "patternProperties": schemas}))
    answers = [b'{"1": 5}', b'{"1": 7}', b'{"1": "a"}']
    assert [matcher.copy().num_valid(list(answer)) == len(answer) for answer in answers] == [True, False, False]


def test_what_is_in_rust_stays_as_it_is() -> None:
    assert rust_pattern(once := rust_pattern(r"[[]\d{a}")) == once


ATOMS = some.sampled_from(
    [*"aBz09_&~ ", ".", r"\d", r"\w", r"\s", r"\n", r"\.", r"\x41", "[a-z]", r"[^a\d]", r"[\w.]", "[&~-]"]
)
PATTERNS = some.recursive(
    ATOMS,
    lambda inner: some.one_of(
        some.lists(inner, min_size=1, max_size=3).map("".join),
        some.tuples(inner, inner).map(lambda both: f"(?:{both[0]}|{both[1]})"),
        some.tuples(inner, some.sampled_from(["*", "?", "+", "{1,2}"])).map(lambda both: f"(?:{both[0]}){both[1]}"),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(PATTERNS, some.lists(some.text(CHARACTERS, max_size=3), min_size=5, max_size=5))
def test_no_text_is_taken_that_python_would_not_take(pattern: str, texts: list[str]) -> None:
    whole = f"^{pattern}$"
    for text in texts:
        if follows(whole, text):
            assert re.search(whole, text)
        elif text.isascii() and not {*text} & {"\r", "\x1c", "\n"}:
            assert not re.search(whole, text)
