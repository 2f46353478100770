"""A text follows a grammar exactly where its JSON follows the grammar's rewriting."""

import json

import llguidance
import pytest

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_quoted import MAX_DEFINITION_CHARS, json_quoted_lark, json_quoted_regex

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk  // two kinds
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change*
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
CODE = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE
PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
GOOD_PATCH = "*** Begin Patch\n*** Add File: a/b.py\n+print(\"a\\n\", '/')\n+\t日本\x01\n*** End Patch\n"


class Bytes:
    """A tokenizer of a token a byte."""

    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def accepts(lark: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        (GOOD_PATCH, True),
        (GOOD_PATCH.removesuffix("\n"), True),
        ("*** Begin Patch\n*** Update File: x\n@@\n-a\n+b\n*** End Patch", True),
        (GOOD_PATCH.replace("Add File", "Remove File"), False),
        (GOOD_PATCH.replace("\n", "\\n"), False),
        (GOOD_PATCH.replace("+print", "print"), False),
        ("", False),
    ],
)
def test_a_patch_is_one_in_json_too(text: str, is_good: bool) -> None:
    assert accepts(PATCH.replace("%import common.LF", r"LF: /\n/"), text) is is_good
    assert accepts(json_quoted_lark(PATCH), quoted(text)) is is_good


TEXTS = [
    "", "a", "/", "a/b", '"', "\\", "\n", "\t", "\x00", "\x1f", "é", "日本", "0", "42", "a\nb", 'x"y', "a b", "]", "^",
    "[", "-", "{", "ab", "aab", "tt", "n", "\\n", '\\"', "_", ".", "x foo\"", 'foo"', 'fox"',
]  # fmt: skip
REGEXES = [
    "a*b?", r"[^\n]+", ".*", r"[\s\S]*", r"\d+", r"\D", r"\w*", r"\W", r"\s", r"\S+", '"', r'[^"]*', r"\\", r"[\\]",
    r"[\]\[]", "[]^]", "[a-c/]+", r"a\/b", r"\x22|\n|\t", "(a|b){1,3}", r"\.", "[^a]", r"[\-.]", r"[^\\]*", r"\u65e5本",
    '.*foo"', r'(?:\\")?', r'x.{2,}"', "[^a]{2}",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regular_expression_matches_the_same_texts(regex: str) -> None:
    plain = f"start: /{regex.replace('/', chr(92) + '/') if chr(92) + '/' not in regex else regex}/"
    written = json_quoted_regex(regex)
    told_apart = [text for text in TEXTS if accepts(plain, text) != accepts(written, quoted(text))]
    assert told_apart == []
    assert not any(accepts(written, text) for text in ('"', "\n", "\\", "\x01")), (
        "which end a string of JSON or break it"
    )


@pytest.mark.parametrize(
    ("lark", "text"),
    [
        ("start: INT WS_INLINE NEWLINE\n%import common.INT\n%import common (WS_INLINE, NEWLINE)", "12\t \r\n"),
        ("start: L+\n%import common.LETTER -> L", "ab"),
        ("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", r'"a\"b"'),
        ('start: "a" "\\"" # the quote\n', 'a"'),
        (CODE, "// @exec: {}\n" + 'print("a")\n'),
        (CODE, "print('a')\n\\"),
    ],
)
def test_a_grammar_may_import_comment_and_name_terminals(lark: str, text: str) -> None:
    assert accepts(json_quoted_lark(lark), quoted(text))


@pytest.mark.parametrize(
    ("lark", "told"),
    [
        ("start: X", "x"),
        ("start: A\n%ignore /b/", "%ignore"),
        ("start: A\nA: /a/ & ~/b/", "&"),
        ("start: /a/i", "no flags here"),
        ("start: /.+/s", "no flags here"),
        ('start: "a"i', "no flags"),
        ("start: /(?=a)b/", "assert: it cannot stand"),
        ("start: /(?<!a)b/", "assert_not: it cannot stand"),
        (r"start: /\bword/", "at: it cannot stand"),
        ("start: /^a$/", "at: it cannot stand"),
        ("start: %json {}", "%json"),
        ("start: @other", "@other"),
        ("start: <[5]>", "<[5]>"),
        ("start: A\n%import python.NAME -> A", "only `common`"),
        ("start: A\n%import common.NOTHING -> A", "`common` has"),
        ("start: /[z-a]/", "bad character range"),
        ("start: A\nA: " + '"a" ' * MAX_DEFINITION_CHARS, "at most"),
        ("", ""),
    ],
)
def test_what_is_not_known_is_refused_by_what_it_is(lark: str, told: str) -> None:
    with pytest.raises(GrammarError) as refused:
        json_quoted_lark(lark)
    assert told in str(refused.value)
