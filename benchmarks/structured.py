"""JSON Schemas from the field: how many can be promised, how exactly, and what a mask costs a token.

    python benchmarks/structured.py --schemas PATH ... [--every 1]

A file has a JSON object a line: `name`, `schema`, and `tests`, each with `data` and whether it is `valid`, as MaskBench
has them (guidance-ai/jsonschemabench). Of a folder all such `.jsonl` files are read, and its `.json` files as schemas
without tests. Ours is beside llguidance alone, and xgrammar alone where it is installed
(`uv pip install xgrammar`), over the same vocabulary. An instance counts as taken where some order of its properties
is: grammars have the schema's. Orders are looked for piece by piece.
"""

import argparse
import importlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import llguidance
import numpy as np
from random_models import make_model
from servers import WORK

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import json_schema_grammar
from kvasir_runtime.structured.vocabulary import Matcher, Vocabulary, num_words

MAX_PIECES = 20_000
"""Of an instance, in all orders that are tried."""
MAX_DRAWN_TOKENS = 400


class Answer(Protocol):
    """The beginning of one, in its grammar."""

    def followed_by(self, text: str) -> "Answer | None":
        """None: it may not follow."""

    def may_end(self) -> bool: ...


@dataclass
class Counts:
    compiled: int = 0
    refused: list[str] = field(default_factory=list)
    """Each with the reason."""
    valid_refused: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """A schema, to be ready for its first token."""

    def row(self, name: str) -> str:
        milliseconds = sorted(1000 * each for each in self.seconds)
        return (
            f"| {name} | {self.compiled} | {len(self.refused)} | {len(self.valid_refused)} "
            f"| {len(self.invalid_accepted)} | {self.compiled - len({*self.valid_refused, *self.invalid_accepted})} "
            f"| {value_at(milliseconds, 0.5):.2f} | {value_at(milliseconds, 0.99):.1f} | {milliseconds[-1]:.0f} |"
        )


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
    print("| | compiled | refused | valid refused | invalid accepted | without such | ms p50 | p99 | most |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, backend in backends.items():
        counts = _measure(backend, lines)
        print(counts.row(name), flush=True)
        if arguments.reasons and backend is backends["kvasir"]:
            arguments.reasons.write_text("".join(f"{each}\n" for each in counts.refused))
    drawn = _draw(vocabulary, tokenizer, lines)
    print(f"\n{drawn.num_valid} of {drawn.num_complete} finished answers of random tokens are valid by jsonschema;")
    print(f"a mask over {tokenizer.vocab_size} tokens: {statistics.median(drawn.micros):.0f} us (median),", end=" ")
    print(f"{value_at(sorted(drawn.micros), 0.99):.0f} (p99), {max(drawn.micros):.0f} (most)")


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
        return self.matcher.copy().fill(np.zeros(num_words(self.tokenizer.vocab_size), dtype=np.int32))


@dataclass(frozen=True)
class XgrammarAnswer:
    matcher: Any

    def followed_by(self, text: str) -> "XgrammarAnswer | None":
        matcher = self.matcher.fork()
        return XgrammarAnswer(matcher) if matcher.accept_string(text) else None

    def may_end(self) -> bool:
        return bool(self.matcher.is_completed())


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
        return XgrammarAnswer(xgrammar.GrammarMatcher(compiled))

    return {"xgrammar alone": compile_schema}


def _measure(compile_schema: Callable[[Any], Answer], lines: Sequence[dict[str, Any]]) -> Counts:
    counts = Counts()
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
            is_taken = Orders(line["schema"]).has_one_for(begun, test["data"])
            if is_taken != test["valid"]:
                (counts.valid_refused if test["valid"] else counts.invalid_accepted).append(line["name"])
    return counts


class Orders:
    """Of an instance's properties: those that the schema lists come first, in its order, then all others."""

    def __init__(self, schema: Any) -> None:
        self._listings = list(_listings(schema))
        self._num_pieces = 0

    def has_one_for(self, answer: Answer, data: Any) -> bool:
        return self._takes(answer, data, lambda end: end.may_end())

    def _takes(self, answer: Answer | None, data: Any, goes_on: Callable[[Answer], bool]) -> bool:
        self._num_pieces += 1
        if answer is None or self._num_pieces > MAX_PIECES:
            return False
        if isinstance(data, dict):
            return self._takes_object(answer.followed_by("{"), data, self._sorted(data), goes_on, "")
        if isinstance(data, list):
            return self._takes_list(answer.followed_by("["), data, goes_on, "")
        end = answer.followed_by(json.dumps(data, ensure_ascii=False))
        return end is not None and goes_on(end)

    def _takes_object(
        self, answer: Answer | None, data: Any, names: list[str], goes_on: Callable[[Answer], bool], comma: str
    ) -> bool:
        if answer is None:
            return False
        if not names:
            end = answer.followed_by("}")
            return end is not None and goes_on(end)
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
            end = answer.followed_by("]")
            return end is not None and goes_on(end)
        first = answer.followed_by(comma) if comma else answer
        return self._takes(first, items[0], lambda after: self._takes_list(after, items[1:], goes_on, ", "))

    def _sorted(self, data: dict[str, Any]) -> list[str]:
        nearest = max(self._listings, key=lambda listing: len(data.keys() & set(listing)), default=[])
        return [name for name in nearest if name in data] + [name for name in data if name not in nearest]


def _listings(schema: Any) -> Iterator[list[str]]:
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield list(schema["properties"])
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _listings(part)


@dataclass
class Drawn:
    num_complete: int = 0
    num_valid: int = 0
    micros: list[float] = field(default_factory=list)


def _draw(vocabulary: Vocabulary, tokenizer: Tokenizer, lines: Sequence[dict[str, Any]]) -> Drawn:
    """An answer to each schema, of tokens drawn at random among the allowed."""
    drawn, draws = Drawn(), random.Random(0)
    for line in lines:
        try:
            matcher = vocabulary.matcher(json_schema_grammar(line["schema"])).copy()
        except GrammarError:
            continue
        text, words = b"", np.zeros(num_words(tokenizer.vocab_size), dtype=np.int32)
        for _ in range(MAX_DRAWN_TOKENS):
            begin = time.perf_counter()
            may_end = matcher.fill(words)
            drawn.micros.append(1e6 * (time.perf_counter() - begin))
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            if may_end and (not allowed or draws.random() < 0.3):
                drawn.num_complete += 1
                drawn.num_valid += _is_valid(line["schema"], text)
                break
            token_id = draws.choice(allowed)
            text += tokenizer.token_bytes(token_id)
            matcher.accept([token_id])
    return drawn


def _is_valid(schema: Any, text: bytes) -> bool:
    validator_class = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(validator_class(schema).is_valid(json.loads(text)))


def value_at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
