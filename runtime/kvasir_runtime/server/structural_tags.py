"""Structural tags: text in which marks that a client names begin what follows a schema, a regular expression or more.

xgrammar has them as formats that stand within each other (`{"format": {...}}`); the older shape is a list of
structures, and of triggers that begin them. Both are written as rules of a grammar, and where that would not say
exactly the same, the format is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvasir_runtime.errors import GrammarError, InvalidRequestError
from kvasir_runtime.server.body import Unsupported
from kvasir_runtime.structured.grammars import ebnf_grammar, regex_grammar, regex_within
from kvasir_runtime.talk.lark import LarkGrammar, TextRule, escaped_regex, not_having, one_of

MAX_MARKS = 64
"""Triggers, excluded texts and ends of one format: each is looked for beside all others."""
MAX_PARTS = 1024

Mark = Annotated[str, Field(min_length=1, max_length=1000)]
Marks = Annotated[list[Mark], Field(max_length=MAX_MARKS, fail_fast=True)]
_ANSWER_ENDS: Final = None
_SOMETHING_FOLLOWS: Final[tuple[str, ...]] = ()


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ConstString(_Format):
    type: Literal["const_string"]
    value: str


class JsonSchema(_Format):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"
    any_order: Unsupported = False
    max_whitespace_cnt: Unsupported = None
    excludes: Unsupported = None


class AnyText(_Format):
    type: Literal["any_text"]
    excludes: Marks = []
    max_chars: Annotated[int, Field(ge=0, le=100_000)] | None = None
    max_tokens: Unsupported = None


class Token(_Format):
    type: Literal["token"]
    token: int | str


class Grammar(_Format):
    type: Literal["grammar"]
    grammar: str


class Regex(_Format):
    type: Literal["regex"]
    pattern: str
    excludes: Unsupported = None


class Elements(_Format):
    type: Literal["sequence", "or"]
    elements: Annotated[list["Format"], Field(min_length=1, max_length=MAX_PARTS)]


class Tag(_Format):
    type: Literal["tag"] = "tag"
    begin: str | Token
    content: "Format"
    end: str | Annotated[Marks, Field(min_length=1)] | Token


class TriggeredTags(_Format):
    type: Literal["triggered_tags"]
    triggers: Annotated[Marks, Field(min_length=1)]
    tags: Annotated[list[Tag], Field(min_length=1, max_length=MAX_PARTS)]
    at_least_one: bool = False
    """The answer begins with one."""
    stop_after_first: bool = False
    excludes: Marks = []


class TagsWithSeparator(_Format):
    type: Literal["tags_with_separator"]
    tags: Annotated[list[Tag], Field(min_length=1, max_length=MAX_PARTS)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Repeated(_Format):
    type: Literal["optional", "plus", "star"]
    content: "Format"


class Repeat(_Format):
    type: Literal["repeat"]
    min: Annotated[int, Field(ge=0, le=MAX_PARTS)]
    max: Annotated[int, Field(ge=-1, le=MAX_PARTS)]
    """-1: any number."""
    content: "Format"


class Dispatch(_Format):
    type: Literal["dispatch"]
    rules: Annotated[list[Annotated[tuple[Mark, "Format"], Field(strict=False)]], Field(min_length=1)]
    loop: bool = True
    excludes: Marks = []


Format = Annotated[
    ConstString | JsonSchema | AnyText | Token | Grammar | Regex | Elements | Tag | TriggeredTags | TagsWithSeparator
    | Repeated | Repeat | Dispatch,
    Field(discriminator="type"),
]  # fmt: skip


class Structure(_Format):
    begin: str
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    end: str


class _Older(_Format):
    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_PARTS)]
    triggers: Annotated[Marks, Field(min_length=1)]


class _Newer(_Format):
    type: Literal["structural_tag"] = "structural_tag"
    format: Format


_OLDER, _NEWER = TypeAdapter(_Older), TypeAdapter(_Newer)


def structural_tag_format(sent: Any, field: str) -> Format:
    """Of either shape. Raises InvalidRequestError."""
    is_older = isinstance(sent, dict) and "structures" in sent
    try:
        asked: _Older | _Newer = (_OLDER if is_older else _NEWER).validate_python(sent)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "/".join(map(str, first["loc"]))
        raise InvalidRequestError(f"{field}: {f'{place}: ' if place else ''}{first['msg']}", field) from error
    if isinstance(asked, _Newer):
        return asked.format
    tags = [
        Tag(begin=each.begin, content=JsonSchema(type="json_schema", json_schema=each.json_schema), end=each.end)
        for each in asked.structures
    ]
    return TriggeredTags(type="triggered_tags", triggers=asked.triggers, tags=tags)


def structural_tag_grammar(asked: Format, special_ids: Mapping[str, int]) -> str:
    """`special_ids`: tokens that no text has, by their spelling; a mark that is one is that token. Raises
    GrammarError."""
    try:
        return _Writing(special_ids).whole(asked)
    except RecursionError as error:
        raise GrammarError("the formats stand too deep within each other") from error


Ends = Sequence[str] | None
"""What follows a format: one of these marks, the answer's end (None), or something else (none)."""


class _Writing:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._spellings = {token_id: spelling for spelling, token_id in special_ids.items()}
        self._grammar = LarkGrammar(special_ids)

    def whole(self, asked: Format) -> str:
        return self._grammar.written(self._rule(asked, _ANSWER_ENDS))

    def _rule(self, asked: Format, ends: Ends) -> str:
        """With the mark that ends it."""
        return self._grammar.rule(self._body(asked, ends) or '""')

    def _body(self, asked: Format, ends: Ends) -> str:
        match asked:
            case AnyText():
                return self._text(asked.type, ends, asked.excludes, max_chars=asked.max_chars)
            case TriggeredTags():
                return self._triggered_tags(asked, ends)
            case Dispatch():
                contents = {pattern: self._rule(content, _SOMETHING_FOLLOWS) for pattern, content in asked.rules}
                _check_marks(asked.type, list(contents), [*asked.excludes, *(ends or ())])
                begun = self._begun(contents, [*asked.excludes, *(ends or ())])
                text = self._text(asked.type, ends, [*asked.excludes, *contents])
                return f"({begun})* {text}" if asked.loop else f"({begun} {self._one_of_marks(ends)} | {text})"
            case Regex():
                return self._regex(asked.pattern, ends)
            case Elements(type="or"):
                return one_of(self._rule(each, ends) for each in asked.elements)
            case Elements():
                first = [self._rule(each, _SOMETHING_FOLLOWS) for each in asked.elements[:-1]]
                return " ".join([*first, self._rule(asked.elements[-1], ends)])
        return f"{self._bounded(asked)} {self._one_of_marks(ends)}".strip()

    def _bounded(self, asked: Format) -> str:
        """Of what shows itself where it ends."""
        match asked:
            case ConstString():
                return self._grammar.text(asked.value)
            case Token():
                return self._grammar.text(self._mark(asked))
            case JsonSchema():
                return self._grammar.json(asked.json_schema)
            case Grammar():
                return self._grammar.other(ebnf_grammar(asked.grammar))
            case Tag():
                return f"{self._grammar.text(self._mark(asked.begin))} {self._rule(asked.content, self._ends(asked))}"
            case TagsWithSeparator():
                tag = self._grammar.rule(one_of(self._rule(each, _SOMETHING_FOLLOWS) for each in asked.tags))
                more = "" if asked.stop_after_first else f"({self._grammar.text(asked.separator)} {tag})*"
                return f"({tag} {more})" + ("" if asked.at_least_one else "?")
            case Repeated():
                sign = {"optional": "?", "plus": "+", "star": "*"}[asked.type]
                return f"({self._rule(asked.content, _SOMETHING_FOLLOWS)}){sign}"
            case Repeat():
                most = "" if asked.max == -1 else asked.max
                return f"({self._rule(asked.content, _SOMETHING_FOLLOWS)}){{{asked.min},{most}}}"
        raise AssertionError(asked)

    def _triggered_tags(self, asked: TriggeredTags, ends: Ends) -> str:
        others = [*asked.excludes, *(ends or ())]
        _check_marks(asked.type, asked.triggers, others)
        rests: dict[str, list[str]] = {trigger: [] for trigger in asked.triggers}
        for tag in asked.tags:
            begin = self._mark(tag.begin)
            trigger = next((each for each in asked.triggers if begin.startswith(each)), None)
            if trigger is None:
                raise GrammarError(f"triggered_tags: no trigger begins {begin!r}; name one")
            self._check_special_tokens_whole(begin, trigger)
            content = self._rule(tag.content, self._ends(tag))
            rests[trigger].append(f"{self._grammar.text(begin[len(trigger) :])} {content}")
        unused = [trigger for trigger, own in rests.items() if not own]
        if unused:
            raise GrammarError(f"triggered_tags: no tag begins with the trigger {unused[0]!r}; leave it out")
        begun = self._begun({trigger: self._grammar.rule(one_of(own)) for trigger, own in rests.items()}, others)
        first = self._grammar.rule(one_of(self._rule(tag, _SOMETHING_FOLLOWS) for tag in asked.tags))
        if asked.stop_after_first and asked.at_least_one:
            return f"{first} {self._one_of_marks(ends)}"
        text = self._text(asked.type, ends, [*asked.excludes, *asked.triggers])
        if asked.stop_after_first:
            return f"({begun} {self._one_of_marks(ends)} | {text})"
        return f"{first if asked.at_least_one else ''} ({begun})* {text}"

    def _begun(self, contents: Mapping[str, str], others: Sequence[str]) -> str:
        """Text up to one of these marks, and what follows it. `others` are not in the text."""
        return self._grammar.rule(one_of(
            f"{self._grammar.text_until(mark, without=not_having([*others, *(contents.keys() - {mark})]))} {content}"
            for mark, content in contents.items()
        ))  # fmt: skip

    def _text(self, name: str, ends: Ends, excludes: Sequence[str], max_chars: int | None = None) -> str:
        """Any that has none of `excludes`, and what ends it."""
        rule = None if max_chars is None else TextRule(max_length=max_chars)
        if ends is _ANSWER_ENDS:
            matching = "(?s:.*)" if rule is None else rule.regexes()[0]
            return self._grammar.text_without(not_having(excludes), matching)
        if not ends:
            raise GrammarError(
                f"{name}: nothing tells where it ends; it can stand last, or be the content of a tag with an end"
            )
        _check_marks(name, ends, excludes)
        return one_of(
            self._grammar.text_until(
                end, without=not_having([*excludes, *(other for other in ends if other != end)]), rule=rule
            )
            for end in ends
        )

    def _regex(self, pattern: str, ends: Ends) -> str:
        """It goes as far as it can, so that a mark behind it is part of it."""
        marks = [end for end in ends or () if self._grammar.may_be_in_text(end)]
        if not ends or len(marks) < len(ends):
            return f"{self._grammar.other(regex_grammar(pattern))} {self._one_of_marks(ends)}"
        return self._grammar.terminal(f"/{regex_within(pattern)}(?:{'|'.join(map(escaped_regex, marks))})/")

    def _one_of_marks(self, ends: Ends) -> str:
        return one_of(map(self._grammar.text, ends)) if ends else ""

    def _ends(self, tag: Tag) -> Sequence[str]:
        ends = tag.end if isinstance(tag.end, list) else [self._mark(tag.end)]
        return [end for end in ends if end]

    def _mark(self, mark: str | Token) -> str:
        if isinstance(mark, str):
            return mark
        spelling = self._spellings.get(mark.token) if isinstance(mark.token, int) else mark.token
        if spelling is None or spelling not in self._special_ids:
            raise GrammarError(f"token: {mark.token!r} is no special token of this model; send its text as a string")
        return spelling

    def _check_special_tokens_whole(self, begin: str, trigger: str) -> None:
        for special in self._special_ids:
            start = begin.find(special, max(0, len(trigger) - len(special) + 1)) if special else -1
            if 0 <= start < len(trigger) < start + len(special):
                raise GrammarError(f"triggered_tags: the trigger {trigger!r} is a part of the token {special!r}")


def _check_marks(name: str, marks: Sequence[str], others: Sequence[str]) -> None:
    """Where one is found within another, it is not known which of them was meant."""
    for mark in marks:
        for other in [*others, *(each for each in marks if each is not mark)]:
            if other in mark:
                raise GrammarError(f"{name}: {mark!r} has {other!r} within it, so it is not clear which one is meant")
