"""Lark grammars of a text as it stands within a JSON string: what a custom tool is called with, in a model's format.

Each string and each regular expression of the grammar is rewritten to what `json.dumps` makes of the text: quotes,
backslashes and control characters have their escapes, all others stay. Rules stay as they are, and terminals become
such.
"""

import json
import re
import re._parser as sre  # type: ignore[import-not-found]
from collections.abc import Iterable
from typing import Any, Final

from llguidance import LLMatcher

from kvasir_runtime.errors import GrammarError

MAX_DEFINITION_CHARS: Final = 65536
_TOKEN: Final = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[a-z]*)
    |(?P<imported>%import[^\n]*)
    |(?P<terminal>\b_*[A-Z][A-Z0-9_]*\b)
    |(?P<refused>%\w+|@\w*|<\S*|~|&)""",
    re.VERBOSE,
)
_IMPORT: Final = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\))\s*")
_COMMON: Final = {
    "CNAME": "/[_a-zA-Z][_a-zA-Z0-9]*/", "CR": r"/\r/", "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/", "DIGIT": "/[0-9]/",
    "ESCAPED_STRING": r'/"(?:[^"\\\n]|\\.)*"/', "HEXDIGIT": "/[0-9a-fA-F]/", "INT": "/[0-9]+/",
    "LCASE_LETTER": "/[a-z]/", "LETTER": "/[a-zA-Z]/", "LF": r"/\n/", "NEWLINE": r"/(?:\r?\n)+/",
    "NUMBER": r"/(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?/", "SIGNED_INT": r"/[+\-]?[0-9]+/",
    "SIGNED_NUMBER": r"/[+\-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?/", "UCASE_LETTER": "/[A-Z]/",
    "WORD": "/[a-zA-Z]+/", "WS": r"/[ \t\f\r\n]+/", "WS_INLINE": r"/[ \t]+/",
}  # fmt: skip
"""Of Lark's library."""
_ESCAPED: Final = [*map(chr, range(0x20)), '"', "\\"]
_NO_ESCAPES: Final = r'[^"\\\x00-\x1f]'
_CATEGORIES: Final = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s", sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_SPACES: Final = "\t\n\x0b\x0c\r "
Node = tuple[Any, Any]
"""Of a regular expression, as Python reads it: an operation and what it is of."""


def json_quoted_lark(definition: str) -> str:
    """Raises GrammarError for what is not known here, or is no grammar."""
    if len(definition) > MAX_DEFINITION_CHARS:
        raise GrammarError(f"it has {len(definition)} characters, but at most {MAX_DEFINITION_CHARS} are read")
    lark = _TOKEN.sub(_quoted_token, definition)
    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))
    if fault:
        raise GrammarError(fault.strip())
    return lark


def json_quoted_regex(regex: str) -> str:
    """A grammar of texts that match as a whole. Raises GrammarError."""
    slashes_escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
    return json_quoted_lark(f"start: /{slashes_escaped.replace(chr(10), chr(92) + 'n')}/")


def _quoted_token(token: re.Match[str]) -> str:
    text = token[0]
    match token.lastgroup:
        case "string":
            return _quoted_string(text)
        case "regex":
            body, _, flags = text[1:].rpartition("/")
            if flags:
                raise GrammarError(f"{text[:80]}: a regular expression has no flags here")
            return _quoted_regex(body)
        case "imported":
            return _imported(text)
        case "terminal":  # which cannot be made of several lexemes
            return f"rule_of_{text.lower()}"
        case "refused":
            raise GrammarError(f"{text[:80]}: it cannot stand in the grammar of a tool's input")
    return ""


def _quoted_string(text: str) -> str:
    if text.endswith("i"):
        raise GrammarError(f"{text[:80]}: a text has no flags here")
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        raise GrammarError(f"{text[:80]}: it is no text: {error}") from error
    return json.dumps(json.dumps(value, ensure_ascii=False)[1:-1], ensure_ascii=False)


def _imported(text: str) -> str:
    found = _IMPORT.fullmatch(text)
    if found is None:
        raise GrammarError(f"{text[:80]}: only `common` can be imported")
    aliases = {found[1]: found[2] or found[1]} if found[1] else {name: name for name in re.findall(r"\w+", found[3])}
    if aliases.keys() - _COMMON.keys():
        raise GrammarError(f"{text[:80]}: `common` has {', '.join(_COMMON)}")
    return "\n".join(_TOKEN.sub(_quoted_token, f"{alias}: {_COMMON[name]}") for name, alias in aliases.items())


def _quoted_regex(body: str) -> str:
    """A rule's expression. What can be an escape is a lexeme of its own, since a lexeme ends where the next letter does
    not go on with it, and every escape begins with the same one."""
    try:
        nodes = list(sre.parse(body))
    except (re.error, RecursionError) as error:
        raise GrammarError(f"/{body[:80]}/: {error}") from error
    if not any(map(_has_escapes, nodes)):
        return f"/{body}/"
    if len(nodes) == 1 and (run := _run(nodes[0])) is not None:
        return run
    return _sequence(nodes)


def _sequence(nodes: Iterable[Node]) -> str:
    return "(" + " ".join(map(_expression, nodes)) + ")"


def _run(node: Node) -> str | None:
    """Any number of letters of one kind: as many as need no escape are one lexeme. None: it is something else."""
    operation, argument = _bare(node)
    if operation is not sre.MAX_REPEAT or argument[0] > 1 or argument[1] is not sre.MAXREPEAT or len(argument[2]) != 1:
        return None
    letters = _bare(argument[2][0])
    if letters[0] not in (sre.IN, sre.ANY, sre.NOT_LITERAL):
        return None
    return f"(/{_plain(letters)}+/ | {_escape(letters)}){'+' if argument[0] else '*'}"


def _bare(node: Node) -> Node:
    """Without groups around it."""
    while node[0] is sre.SUBPATTERN and len(node[1][3]) == 1:
        node = node[1][3][0]
    return node


def _expression(node: Node) -> str:
    operation, argument = node
    if operation in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
        escapes = _escape(node)
        plain = "" if operation is sre.LITERAL and escapes else f"/{_plain(node)}/"
        return f"({' | '.join(filter(None, [plain, escapes]))})"
    if operation is sre.SUBPATTERN and not argument[1] and not argument[2]:
        return _sequence(argument[3])
    if operation is sre.BRANCH:
        return "(" + " | ".join(map(_sequence, argument[1])) + ")"
    if operation is sre.MAX_REPEAT:
        least, most, nodes = argument
        return f"{_sequence(nodes)}{{{least},{'' if most is sre.MAXREPEAT else most}}}"
    raise GrammarError(f"{str(operation).lower()}: it cannot stand in a regular expression here")


def _has_escapes(node: Node) -> bool:
    operation, argument = node
    match operation:
        case sre.LITERAL | sre.NOT_LITERAL | sre.IN | sre.ANY:
            return any(_is_one_of(node, letter) for letter in _ESCAPED)
        case sre.BRANCH:
            return any(_has_escapes(each) for branch in argument[1] for each in branch)
        case sre.SUBPATTERN:
            return any(map(_has_escapes, argument[3]))
        case sre.MAX_REPEAT:
            return any(map(_has_escapes, argument[2]))
    raise GrammarError(f"{str(operation).lower()}: it cannot stand in a regular expression here")


def _escape(node: Node) -> str:
    """Those of its letters that JSON writes with a backslash; empty: none."""
    escapes = [re.escape(json.dumps(letter)[1:-1]) for letter in _ESCAPED if _is_one_of(node, letter)]
    return f"/{'|'.join(escapes)}/" if escapes else ""


def _plain(node: Node) -> str:
    """The others."""
    operation, argument = node
    match operation:
        case sre.LITERAL:
            return rf"\x{{{argument:x}}}"
        case sre.NOT_LITERAL:
            return rf"[[^\x{{{argument:x}}}]&&{_NO_ESCAPES}]"
        case sre.ANY:
            return rf"[[^\n]&&{_NO_ESCAPES}]"
    return f"[[{''.join(map(_written, argument))}]&&{_NO_ESCAPES}]"


def _written(item: Node) -> str:
    operation, argument = item
    match operation:
        case sre.NEGATE:
            return "^"
        case sre.LITERAL:
            return rf"\x{{{argument:x}}}"
        case sre.RANGE:
            return rf"\x{{{argument[0]:x}}}-\x{{{argument[1]:x}}}"
    return _CATEGORIES[argument]


def _is_one_of(node: Node, letter: str) -> bool:
    operation, argument = node
    match operation:
        case sre.LITERAL:
            return bool(ord(letter) == argument)
        case sre.NOT_LITERAL:
            return bool(ord(letter) != argument)
        case sre.ANY:
            return letter != "\n"
        case sre.RANGE:
            return bool(argument[0] <= ord(letter) <= argument[1])
        case sre.CATEGORY:
            is_in = letter in _SPACES if _CATEGORIES[argument] in (r"\s", r"\S") else False
            return is_in != _CATEGORIES[argument].isupper()
    is_negated = argument[0][0] is sre.NEGATE
    return any(_is_one_of(item, letter) for item in argument[is_negated:]) != is_negated
