"""Structural tags in both shapes: which texts follow one, and what is refused by name. What is taken here, xgrammar
0.2.8 takes too."""

import json
import re
from typing import Any

import numpy as np
import pytest
from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable

from kvasir_runtime.errors import GrammarError, InvalidRequestError
from kvasir_runtime.server.structural_tags import structural_tag_format, structural_tag_grammar
from kvasir_runtime.structured.vocabulary import Vocabulary, num_words

CALL, ENDED = "<300>", "<301>"
SPECIAL_IDS = {CALL: 300, ENDED: 301}
ANY = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "^[a-z]+$"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [tag("<a>", const("1"), "</a>"), tag("<b>", const("2"), "</b>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ","}
DISPATCH = {"type": "dispatch", "rules": [["<a>", const("1")], ["<b>", const("2")]]}
ONE, TWO = "x<a>1</a>", "x<a>1</a>y<b>2</b>z"
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const("abc"), ["abc"], ["", "ab", "abcd"]),
    (INTEGER, ["12"], ["", "a", '"1"']),
    (WORD, ["ab"], ["", "1", "ab1"]),
    ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "b" | "c"'}, ["ab", "ac"], ["a", "b"]),
    (ANY, ["", "x\n<a>"], [CALL]),
    (ANY | {"excludes": ["bc"], "max_chars": 4}, ["", "abdc"], ["abc", "aaaaa"]),
    ({"type": "token", "token": CALL}, [CALL], ["", "x", ENDED]),
    ({"type": "token", "token": 300}, [CALL], [ENDED]),
    ({"type": "sequence", "elements": [const("a"), INTEGER, const(" "), ANY]}, ["a1 ", "a12 x"], ["a", "1 ", "a1x"]),
    ({"type": "or", "elements": [const("a"), WORD, INTEGER]}, ["a", "b", "1"], ["", "a1"]),
    ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    ({"type": "plus", "content": const("a")}, ["a", "aa"], [""]),
    ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
    (tag("<t>", ANY, "</t>"), ["<t>x<y</t>", "<t></t>"], ["<t>x", "<t></t></t>", "<t>x</t>x"]),
    (tag("<t>", ANY, ["</t>", "</u>"]), ["<t>x</t>", "<t>x</u>"], ["<t>x</u></t>"]),
    (tag("<t>", ANY | {"max_chars": 2, "excludes": ["b"]}, "</t>"), ["<t>xx</t>"], ["<t>xxx</t>", "<t>b</t>"]),
    (tag(CALL, ANY, {"type": "token", "token": 301}), [f"{CALL}x{ENDED}"], [f"{CALL}{CALL}{ENDED}", f"x{ENDED}"]),
    (tag("<t>", WORD, "q</t>"), ["<t>abq</t>", "<t>qq</t>"], ["<t>q</t>", "<t>ab</t>"]),
    (tag("<t>", WORD, ENDED), [f"<t>ab{ENDED}"], ["<t>ab"]),
    (tag("<t>", INTEGER, ""), ["<t>1"], ["<t>"]),
    (tag("<t>", TRIGGERED, "!"), ["<t>x!", f"<t>{TWO}!"], ["<t>!!", "<t><a!", "<t>x"]),
    (tag("<t>", TRIGGERED | {"stop_after_first": True}, "!"), ["<t>x!", f"<t>{ONE}!"], [f"<t>{TWO}!"]),
    (tag("<t>", {"type": "sequence", "elements": [const("a"), ANY]}, "!"), ["<t>ab!"], ["<t>!", "<t>a!!"]),
    (TRIGGERED, ["", "x", "<c>", ONE, TWO, "<a>1</a><b>2</b>"], ["<b", "<a>2</a>", "<a>1</b>", "<ab>"]),
    (TRIGGERED | {"stop_after_first": True}, ["", "x", ONE], [TWO, "<a>1</a>x"]),
    (TRIGGERED | {"at_least_one": True}, ["<a>1</a>", "<b>2</b>x<a>1</a>"], ["", "x", ONE]),
    (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, ["<b>2</b>"], ["", "<b>2</b>x", ONE]),
    (TRIGGERED | {"excludes": ["zz"]}, ["z", "z<a>1</a>"], ["zz", "zz<a>1</a>", "<a>1</a>azzb"]),
    (TRIGGERED | {"triggers": ["<"]}, ["x", ONE], ["<c>"]),
    (TRIGGERED | {"triggers": [CALL], "tags": [tag(f"{CALL}a", INTEGER, ENDED)]},
     ["x", f"x{CALL}a1{ENDED}y"], [CALL, f"{CALL}b"]),
    (SEPARATED, ["", "<a>1</a>", "<a>1</a>,<b>2</b>"], ["<a>1</a>,", "x"]),
    (SEPARATED | {"at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>,<b>2</b>"]),
    (DISPATCH, ["", "x", "x<a>1", "<a>1y<b>2"], ["<a>2", "<a>"]),
    (DISPATCH | {"loop": False}, ["", "x", "x<a>1"], ["<a>1x", "<a>1<b>2"]),
]  # fmt: skip
OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(ByteTable(), VOCAB_SIZE)


def follows(vocabulary: Vocabulary, sent: dict[str, Any], text: str) -> bool:
    """As a whole answer, whose marks in `SPECIAL_IDS` are tokens."""
    matcher = vocabulary.matcher(structural_tag_grammar(structural_tag_format(sent, "field"), SPECIAL_IDS))
    token_ids: list[int] = []
    for piece in re.split(f"({'|'.join(SPECIAL_IDS)})", text):
        token_ids += [SPECIAL_IDS[piece]] if piece in SPECIAL_IDS else list(piece.encode())
    if matcher.num_valid(token_ids) < len(token_ids):
        return False
    matcher.accept(token_ids)
    return matcher.fill(np.zeros(num_words(VOCAB_SIZE), dtype=np.int32))


@pytest.mark.parametrize(("asked", "taken", "others"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_a_format_takes_its_texts_and_no_others(
    asked: dict[str, Any], taken: list[str], others: list[str], vocabulary: Vocabulary
) -> None:
    for text in taken:
        assert follows(vocabulary, {"format": asked}, text), text
    for text in others:
        assert not follows(vocabulary, {"format": asked}, text), text


def test_the_older_shape_is_triggered_tags(vocabulary: Vocabulary) -> None:
    for text in ("", "x", 'x<f=a>12</f>y<f=b>"x"</f>'):
        assert follows(vocabulary, OLDER, text), text
    for text in ("<f=c>", "<f=a>x</f>", "<f=b>1</f>"):
        assert not follows(vocabulary, OLDER, text), text


UNKNOWN = {"type": "any_tokens"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "format: Field required"),
    ({"format": 3}, "format: "),
    ({"format": UNKNOWN}, "'any_tokens'"),
    ({"format": INTEGER | {"style": "qwen_xml"}}, "style"),
    ({"format": INTEGER | {"any_order": True}}, "any_order"),
    ({"format": INTEGER | {"json_schema": {"uniqueItems": True}}}, "'uniqueItems' at the top"),
    ({"format": ANY | {"max_tokens": 3}}, "max_tokens"),
    ({"format": ANY | {"extra": 3}}, "extra"),
    ({"format": {"type": "sequence", "elements": [ANY, const("a")]}}, "any_text: nothing tells where it ends"),
    ({"format": {"type": "star", "content": TRIGGERED}}, "triggered_tags: nothing tells where it ends"),
    ({"format": tag("<t>", ANY, "")}, "any_text: nothing tells where it ends"),
    ({"format": tag("<t>", ANY | {"excludes": ["/"]}, "</t>")}, "has '/' within it"),
    ({"format": {"type": "token", "token": "<9>"}}, "no special token of this model"),
    ({"format": {"type": "token", "token": 65}}, "no special token of this model"),
    ({"format": TRIGGERED | {"triggers": ["<a"]}}, "no trigger begins '<b>'"),
    ({"format": TRIGGERED | {"triggers": ["<a", "<b", "<c"]}}, "no tag begins with the trigger '<c'"),
    ({"format": TRIGGERED | {"triggers": ["<", "<a"]}}, "has '<' within it"),
    ({"format": TRIGGERED | {"triggers": ["<3"], "tags": [tag(CALL, ANY, ENDED)]}}, "part of the token '<300>'"),
    ({"format": {"type": "regex", "pattern": "(a"}}, "unclosed group"),
    ({"format": tag("<t>", {"type": "regex", "pattern": "a)|(b"}, "</t>")}, "unopened group"),
    ({"format": {"type": "grammar", "grammar": "root ::= foo"}}, "foo"),
    (OLDER | {"triggers": []}, "triggers: List should have at least 1 item"),
    (OLDER | {"structures": [{"begin": "a", "end": "b"}]}, "structures/0/schema: Field required"),
]


@pytest.mark.parametrize(("sent", "words"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_has_no_such_grammar_is_refused_by_name(sent: dict[str, Any], words: str, vocabulary: Vocabulary) -> None:
    with pytest.raises((InvalidRequestError, GrammarError), match=re.escape(words)):
        follows(vocabulary, sent, "")


def test_formats_within_each_other_have_a_depth() -> None:
    sent: dict[str, Any] = const("a")
    for _ in range(5000):
        sent = {"type": "optional", "content": sent}
    with pytest.raises((InvalidRequestError, GrammarError)):
        structural_tag_grammar(structural_tag_format({"format": sent}, "field"), {})
