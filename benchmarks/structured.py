"""JSON Schemas from the field: how many can be promised, how exactly, and what a mask costs a token.

    python benchmarks/structured.py --schemas PATH ... [--every 1]

A file has a JSON object a line: `name`, `schema`, and `tests`, each with `data` and whether it is `valid`, as MaskBench
has them (guidance-ai/jsonschemabench). Of a folder all such `.jsonl` files are read, and its `.json` files as schemas
without tests. Ours is beside llguidance alone, and xgrammar alone where it is installed
(`uv pip install xgrammar`), over the same vocabulary. An instance counts as taken where some order of its properties
is: grammars have the schema's. Orders are looked for piece by piece, and invalid instances of which not all were tried
are counted (cut). Then answers are drawn at random from the masks:
a schema is kept where no instance is mistaken and all of them are valid.
"""

import argparse
import importlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import llguidance
import numpy as np
from numpy.typing import NDArray
from random_models import make_model
from servers import WORK

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import json_schema_grammar
from kvasir_runtime.structured.vocabulary import Matcher, Vocabulary, num_words

MAX_PIECES = 20_000
"""Of an instance, in all orders that are tried."""
NUM_DRAWN = 3
"""Answers to a schema."""
MAX_DRAWN_TOKENS = 200


class Answer(Protocol):
    """The beginning of one, in its grammar."""

    def followed_by(self, text: str) -> "Answer | None":
        """None: it may not follow."""

    def may_end(self) -> bool: ...

    def allowed_tokens(self) -> tuple[NDArray[np.intp], bool]:
        """And whether it may end."""

    def with_token(self, token_id: int) -> "Answer": ...


@dataclass
class Counts:
    compiled: int = 0
    refused: list[str] = field(default_factory=list)
    """Each with the reason."""
    valid_refused: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    num_cut: int = 0
    """Invalid instances of which not all orders were tried."""
    drawn: list[bool] = field(default_factory=list)
    """Of answers that came to an end, whether each is valid."""
    broken: list[str] = field(default_factory=list)
    """Schemas that an answer of its own broke."""
    seconds: list[float] = field(default_factory=list)
    """A schema, to be ready for its first token."""

    def row(self, name: str) -> str:
        milliseconds = sorted(1000 * each for each in self.seconds)
        return (
            f"| {name} | {self.compiled} | {len(self.refused)} | {len(self.valid_refused)} "
            f"| {len(self.invalid_accepted)} ({self.num_cut} cut) | {sum(self.drawn)} of {len(self.drawn)} "
            f"| {self._num_kept} | {value_at(milliseconds, 0.5):.2f} | {value_at(milliseconds, 0.99):.1f} "
            f"| {milliseconds[-1]:.0f} |"
        )

    @property
    def _num_kept(self) -> int:
        return self.compiled - len({*self.valid_refused, *self.invalid_accepted, *self.broken})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, nargs="+", required=True, metavar="PATH")
    parser.add_argument("--every", type=int, default=1, help="take each so many-th schema only")
    parser.add_argument("--reasons", type=Path, metavar="FILE", help="where to write what ours refuses, and why")
    arguments = parser.parse_args()
    lines = list(schema_lines(arguments.schemas))[:: arguments.every]
    tokenizer = Tokenizer.load(make_model("llama-100m", WORK / "models"))
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    backends = {
        "kvasir": _over(vocabulary, tokenizer, json_schema_grammar),
        "llguidance alone": _over(vocabulary, tokenizer, _as_it_is),
        **_xgrammar(tokenizer),
    }
    print("| | compiled | refused | valid refused | invalid accepted | drawn are valid | kept | ms p50 | p99 | most |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, backend in backends.items():
        counts = _measure(backend, lines, tokenizer)
        print(counts.row(name), flush=True)
        if arguments.reasons and backend is backends["kvasir"]:
            arguments.reasons.write_text("".join(f"{each}\n" for each in counts.refused))
    micros = sorted(_mask_micros(vocabulary, tokenizer, lines))
    print(f"\na mask over {tokenizer.vocab_size} tokens: {statistics.median(micros):.0f} us (median),", end=" ")
    print(f"{value_at(micros, 0.99):.0f} (p99), {micros[-1]:.0f} (most)")


def schema_lines(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        for each in sorted(path.rglob("*.json*")):
            yield from _lines(each)
    elif path.suffix == ".json":
        yield {"name": path.stem, "schema": json.loads(path.read_text()), "tests": []}
    else:
        yield from map(json.loads, path.read_text().splitlines())


@dataclass(frozen=True)
class LlguidanceAnswer:
    matcher: Matcher
    tokenizer: Tokenizer

    def followed_by(self, text: str) -> "LlguidanceAnswer | None":
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.matcher.num_valid(token_ids) < len(token_ids):
            return None
        matcher = self.matcher.copy()
        matcher.accept(token_ids)
        return LlguidanceAnswer(matcher, self.tokenizer)

    def may_end(self) -> bool:
        return self.matcher.copy().fill(self._words())

    def allowed_tokens(self) -> tuple[NDArray[np.intp], bool]:
        words = self._words()
        may_end = self.matcher.fill(words)
        return ids_in(words), may_end

    def with_token(self, token_id: int) -> "LlguidanceAnswer":
        self.matcher.accept([token_id])
        return self

    def _words(self) -> NDArray[np.int32]:
        return np.zeros(num_words(self.tokenizer.vocab_size), dtype=np.int32)


@dataclass(frozen=True)
class XgrammarAnswer:
    xgrammar: Any
    matcher: Any
    vocab_size: int
    end_id: int

    def followed_by(self, text: str) -> "XgrammarAnswer | None":
        matcher = self.matcher.fork()
        return replace(self, matcher=matcher) if matcher.accept_string(text) else None

    def may_end(self) -> bool:
        return bool(self.matcher.is_completed())

    def allowed_tokens(self) -> tuple[NDArray[np.intp], bool]:
        words = self.xgrammar.allocate_token_bitmask(1, self.vocab_size)
        self.matcher.fill_next_token_bitmask(words)
        allowed = ids_in(words.numpy()[0])
        return allowed[allowed != self.end_id], self.end_id in allowed

    def with_token(self, token_id: int) -> "XgrammarAnswer":
        self.matcher.accept_token(token_id)
        return self


def ids_in(words: NDArray[np.int32]) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def _over(vocabulary: Vocabulary, tokenizer: Tokenizer, grammar_of: Callable[[Any], str]) -> Callable[[Any], Answer]:
    return lambda schema: LlguidanceAnswer(vocabulary.matcher(grammar_of(schema)), tokenizer)


def _as_it_is(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _xgrammar(tokenizer: Tokenizer) -> dict[str, Callable[[Any], Answer]]:
    """Empty where it is not installed."""
    try:
        xgrammar = importlib.import_module("xgrammar")
    except ImportError:
        return {}
    words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(words, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[tokenizer.eos_token_id])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Answer:
        compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        return XgrammarAnswer(xgrammar, xgrammar.GrammarMatcher(compiled), len(words), tokenizer.eos_token_id)

    return {"xgrammar alone": compile_schema}


def _measure(compile_schema: Callable[[Any], Answer], lines: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> Counts:
    counts, draws = Counts(), random.Random(0)
    for line in lines:
        begin = time.perf_counter()
        try:
            begun = compile_schema(line["schema"])
        except (GrammarError, RuntimeError, ValueError) as error:
            counts.refused.append(f"{line['name']}: {str(error).splitlines()[0]}")
            continue
        counts.compiled += 1
        counts.seconds.append(time.perf_counter() - begin)
        for test in line["tests"]:
            orders = Orders(line["schema"])
            is_taken = orders.has_one_for(begun, test["data"])
            counts.num_cut += orders.are_cut and not test["valid"]
            if is_taken != test["valid"]:
                (counts.valid_refused if test["valid"] else counts.invalid_accepted).append(line["name"])
        for _ in range(NUM_DRAWN):
            copy = begun.followed_by("")
            text = None if copy is None else _drawn(copy, tokenizer, draws)
            if text is not None:
                counts.drawn.append(_is_valid(line["schema"], text))
                counts.broken += [] if counts.drawn[-1] else [line["name"]]
    return counts


def _drawn(answer: Answer, tokenizer: Tokenizer, draws: random.Random) -> bytes | None:
    """Of tokens drawn at random among the allowed; None: it came to no end."""
    text = b""
    for _ in range(MAX_DRAWN_TOKENS):
        allowed, may_end = answer.allowed_tokens()
        if may_end and (not len(allowed) or draws.random() < 0.3):
            return text
        if not len(allowed):
            return None
        token_id = int(draws.choice(allowed))
        text += tokenizer.token_bytes(token_id)
        answer = answer.with_token(token_id)
    return None


class Orders:
    """Of an instance's properties: those that the schema lists come first, in its order, then all others."""

    def __init__(self, schema: Any) -> None:
        self._listings = list(_listings(schema))
        self._num_pieces = 0

    @property
    def are_cut(self) -> bool:
        """Whether there are more than were tried."""
        return self._num_pieces > MAX_PIECES

    def has_one_for(self, answer: Answer, data: Any) -> bool:
        return self._takes(answer, data, lambda end: end.may_end())

    def _takes(self, answer: Answer | None, data: Any, goes_on: Callable[[Answer], bool]) -> bool:
        self._num_pieces += 1
        if answer is None or self.are_cut:
            return False
        if isinstance(data, dict):
            return self._takes_object(answer.followed_by("{"), data, self._sorted(data), goes_on, "")
        if isinstance(data, list):
            return self._takes_list(answer.followed_by("["), data, goes_on, "")
        return _ends_with(answer, json.dumps(data, ensure_ascii=False), goes_on)

    def _takes_object(
        self, answer: Answer | None, data: Any, names: list[str], goes_on: Callable[[Answer], bool], comma: str
    ) -> bool:
        if answer is None:
            return False
        if not names:
            return _ends_with(answer, "}", goes_on)
        for name in names:
            others = [each for each in names if each != name]

            def then(after: Answer, others: list[str] = others) -> bool:
                return self._takes_object(after, data, others, goes_on, ", ")

            begun = answer.followed_by(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
            if self._takes(begun, data[name], then):
                return True
        return False

    def _takes_list(
        self, answer: Answer | None, items: list[Any], goes_on: Callable[[Answer], bool], comma: str
    ) -> bool:
        if answer is None:
            return False
        if not items:
            return _ends_with(answer, "]", goes_on)
        first = answer.followed_by(comma) if comma else answer
        return self._takes(first, items[0], lambda after: self._takes_list(after, items[1:], goes_on, ", "))

    def _sorted(self, data: dict[str, Any]) -> list[str]:
        nearest = max(self._listings, key=lambda listing: len(data.keys() & set(listing)), default=[])
        return [name for name in nearest if name in data] + [name for name in data if name not in nearest]


def _ends_with(answer: Answer, text: str, goes_on: Callable[[Answer], bool]) -> bool:
    end = answer.followed_by(text)
    return end is not None and goes_on(end)


def _listings(schema: Any) -> Iterator[list[str]]:
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield list(schema["properties"])
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _listings(part)


def _mask_micros(vocabulary: Vocabulary, tokenizer: Tokenizer, lines: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Of each token of an answer to each schema."""
    draws, words = random.Random(0), np.zeros(num_words(tokenizer.vocab_size), dtype=np.int32)
    for line in lines:
        try:
            matcher = vocabulary.matcher(json_schema_grammar(line["schema"])).copy()
        except GrammarError:
            continue
        for _ in range(MAX_DRAWN_TOKENS):
            begin = time.perf_counter()
            matcher.fill(words)
            yield 1e6 * (time.perf_counter() - begin)
            allowed = ids_in(words)
            if not len(allowed):
                break
            matcher.accept([int(draws.choice(allowed))])


def _is_valid(schema: Any, text: bytes) -> bool:
    validator_class = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        return bool(validator_class(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def value_at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
