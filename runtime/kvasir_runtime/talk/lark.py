"""Grammars as llguidance reads them: rules of Lark's kind, and JSON Schemas that they refer to."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.grammars import named_parts
from kvasir_runtime.structured.json_schema import json_schema_grammar

ANY_TEXT: Final = "(?s:.*)"
_BARE_SLASH: Final = re.compile(r"(?<!\\)/")
_SLASH: Final = r"\\/"
SPACE: Final = r"/[ \n]{1,2}/"


@dataclass(frozen=True, slots=True)
class TextRule:
    """What is asked of a text."""

    min_length: int = 0
    max_length: int | None = None
    pattern: str | None = None
    """A regular expression of JSON Schema: it is found somewhere."""
    whole: str | None = None
    """A regular expression of the whole."""
    or_null: bool = False
    """It may be `null` all the same."""

    @property
    def has_length(self) -> bool:
        return bool(self.min_length) or self.max_length is not None

    @property
    def has_regex(self) -> bool:
        return self.pattern is not None or self.whole is not None

    def regexes(self) -> list[str]:
        """Of the whole text, as Lark has them."""
        longest = "" if self.max_length is None else self.max_length
        found = [f"(?s:.{{{self.min_length},{longest}}})"] if self.has_length else []
        found += [] if self.pattern is None else [_whole(self.pattern)]
        found += [] if self.whole is None else [self.whole]
        return [f"(?:{regex}|null)" if self.or_null else f"(?:{regex})" for regex in found or [ANY_TEXT]]


class LarkGrammar:
    """One that is being written. `special_ids`: tokens that no text has, by their spelling."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        spellings = sorted(filter(None, special_ids), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Of rules and other grammars, by what they say."""

    def is_special(self, mark: str) -> bool:
        return mark in self._special_ids

    def may_be_in_text(self, mark: str) -> bool:
        """It has no special token."""
        return self._specials is None or self._specials.search(mark) is None

    def text(self, text: str) -> str:
        """Exactly this, its special tokens as such."""
        parts, begin = [], 0
        for found in self._specials.finditer(text) if self._specials is not None else ():
            parts += [_quoted(text[begin : found.start()]), f"<[{self._special_ids[found.group()]}]>"]
            begin = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[begin:])]))

    def rule(self, body: str, options: str = "") -> str:
        return self._named("r", f"{options}: {body}")

    def terminal(self, *expressions: str) -> str:
        """Of text that matches all of them, which stand as Lark has them."""
        return self._named("T", ": " + " & ".join(expressions))

    def recursive_rule(self, key: str, body: Callable[[], str]) -> str:
        """`body` may refer to the rule itself, by its key."""
        if key not in self._names:
            name = self._names[key] = f"r{len(self._names)}"
            self._rules.append(f"{name}: {body()}")
        return self._names[key]

    def _named(self, prefix: str, written: str) -> str:
        key = prefix + written
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}"
            self._rules.append(self._names[key] + written)
        return self._names[key]

    def text_until(self, end: str, *, without: Sequence[str] = (), rule: TextRule | None = None) -> str:
        """Text up to the first `end`, and that. `without`: regular expressions of what it must not have anywhere."""
        special = self._specials.search(end) if self._specials is not None else None
        if special is not None:
            before, behind = escaped_regex(end[: special.start()]), self.text(end[special.start() :])
            if rule is not None:
                texts = [f"/{regex}{before}/" for regex in rule.regexes()]
                return f"{self.terminal(*texts, *_exclusions(without))} {behind}"
            spelled = escaped_regex(special.group())  # which would look the same
            return f"{self.terminal(f'/{ANY_TEXT}{before}/', *_exclusions([*without, spelled]))} {behind}"
        mark = escaped_regex(end)
        if rule is None:
            return self.rule(self.terminal(f"/{ANY_TEXT}{mark}/", *_exclusions(without)), "[lazy]")
        ended = [*(f"/{regex}{mark}/" for regex in rule.regexes()), *_exclusions(without)]
        if rule.has_regex:
            return self.rule(self.terminal(*ended, f"~/{ANY_TEXT}{mark}(?s:.+)/"), "[lazy]")
        fewest = rule.min_length  # counting costs little where it is not crossed with looking for the mark
        earlier = [f"~/(?s:.{{0,{fewest - 1}}}){mark}(?s:.+)/"] if fewest else []
        return self.rule(self.terminal(*ended, *earlier), "[lazy]")

    def text_without(self, without: Iterable[str], matching: str = ANY_TEXT) -> str:
        return self.terminal(f"/{matching}/", *_exclusions(without))

    def json(self, schema: Any, fallback: Any = None) -> str:
        """JSON that follows the schema; where it cannot be promised, the fallback. Raises GrammarError."""
        try:
            written = json_schema_grammar(schema)
            if fallback is not None and LLMatcher.validate_grammar(written):
                written = json_schema_grammar(fallback)
        except GrammarError:
            if fallback is None:
                raise
            written = json_schema_grammar(fallback)
        return self.other(written)

    def other(self, grammar: str) -> str:
        """Text that follows a grammar of its own."""
        if grammar not in self._names:
            self._names[grammar], parts = named_parts(f"j{len(self._names)}n", grammar)
            self._others += parts
        return self._names[grammar]

    def space(self) -> str:
        """Or none."""
        return self.terminal(SPACE) + "?"

    def written(self, start: str) -> str:
        lark = "\n".join([f"start: {start}", *self._rules])
        parts = [{"name": "calls", "lark_grammar": lark}, *self._others]
        return json.dumps({"grammars": parts}, ensure_ascii=False)


def fault_of_regex(pattern: str) -> str:
    """Why it is none that llguidance knows; empty: it is one."""
    within = LLMatcher.grammar_from_lark(f"start: /x(?:{_whole(pattern)})x/")  # no anchor is left
    return str(LLMatcher.validate_grammar(within)).strip()


def one_of(alternatives: Iterable[str]) -> str:
    return "(" + " | ".join(alternatives) + ")"


def not_having(marks: Sequence[str]) -> list[str]:
    """Regular expressions of them; what begins with another needs none of its own."""
    return [escaped_regex(mark) for mark in marks if not any(mark != each and mark.startswith(each) for each in marks)]


def escaped_regex(text: str) -> str:
    """A regular expression of this text alone, as it stands between Lark's slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("\\\t", r"\t").replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _whole(pattern: str) -> str:
    begun = "" if pattern.startswith("^") else ANY_TEXT
    is_ended = pattern.endswith("$") and not pattern.endswith(r"\$")
    bare = pattern.removeprefix("^").removesuffix("$") if is_ended else pattern.removeprefix("^")
    return f"{begun}(?:{_BARE_SLASH.sub(_SLASH, bare)}){'' if is_ended else ANY_TEXT}"


def _exclusions(without: Iterable[str]) -> list[str]:
    return [f"~/{ANY_TEXT}(?:{regex}){ANY_TEXT}/" for regex in without]
