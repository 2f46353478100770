"""JSON Schemas from the field: how many can be promised, how exactly, and what a mask costs a token.

    python benchmarks/structured.py --schemas PATH ... [--every 1]

A file has a JSON object a line: `name`, `schema`, and `tests`, each with `data` and whether it is `valid`, as MaskBench
has them (guidance-ai/jsonschemabench). Of a folder all such `.jsonl` files are read, and its `.json` files as schemas
without tests. Ours is beside llguidance alone, and xgrammar alone where it is installed
(`uv pip install xgrammar`), over the same vocabulary. An instance counts as taken where some order of its properties
is: grammars have the schema's.
"""

import argparse
import importlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
from random_models import make_model
from servers import WORK

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import json_schema_grammar
from kvasir_runtime.structured.vocabulary import Matcher, Vocabulary, num_words

MAX_ORDERS = 500
MAX_DRAWN_TOKENS = 400
SECONDS_AN_INSTANCE = 2.0

Takes = Callable[[str], bool]
"""Whether a text is an answer."""


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
            f"| {len(self.invalid_accepted)} "
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
    print("| | compiled | refused | valid refused | invalid accepted | ms p50 | p99 | most |")
    print("|---|---|---|---|---|---|---|---|")
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


def _over(vocabulary: Vocabulary, tokenizer: Tokenizer, grammar_of: Callable[[Any], str]) -> Callable[[Any], Takes]:
    def compile_schema(schema: Any) -> Takes:
        matcher = vocabulary.matcher(grammar_of(schema))

        def takes(text: str) -> bool:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            return _follows(matcher, token_ids, num_words(tokenizer.vocab_size))

        return takes

    return compile_schema


def _as_it_is(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _xgrammar(tokenizer: Tokenizer) -> dict[str, Callable[[Any], Takes]]:
    """Empty where it is not installed."""
    try:
        xgrammar = importlib.import_module("xgrammar")
    except ImportError:
        return {}
    words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(words, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[tokenizer.eos_token_id])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Takes:
        compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

        def takes(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(compiled)
            return bool(matcher.accept_string(text) and matcher.is_completed())

        return takes

    return {"xgrammar alone": compile_schema}


def _follows(matcher: Matcher, token_ids: list[int], width: int) -> bool:
    matcher = matcher.copy()
    if matcher.num_valid(token_ids) < len(token_ids):
        return False
    matcher.accept(token_ids)
    return matcher.fill(np.zeros(width, dtype=np.int32))


def _measure(compile_schema: Callable[[Any], Takes], lines: Sequence[dict[str, Any]]) -> Counts:
    counts = Counts()
    for line in lines:
        begin = time.perf_counter()
        try:
            takes = compile_schema(line["schema"])
        except (GrammarError, RuntimeError, ValueError) as error:
            counts.refused.append(f"{line['name']}: {str(error).splitlines()[0]}")
            continue
        counts.compiled += 1
        counts.seconds.append(time.perf_counter() - begin)
        for test in line["tests"]:
            is_taken = _takes_some_order(takes, test["data"])
            if is_taken != test["valid"]:
                (counts.valid_refused if test["valid"] else counts.invalid_accepted).append(line["name"])
    return counts


def _takes_some_order(takes: Takes, data: Any) -> bool:
    end = time.perf_counter() + SECONDS_AN_INSTANCE
    for each in itertools.islice(_orders(data), MAX_ORDERS):
        if takes(json.dumps(each, ensure_ascii=False)):
            return True
        if time.perf_counter() > end:
            return False
    return False


def _orders(data: Any) -> Iterator[Any]:
    """The data with its properties in other orders, inner ones first."""
    if isinstance(data, dict):
        ways = [list(itertools.islice(_orders(value), 24)) for value in data.values()]
        for order in itertools.islice(itertools.permutations(range(len(data))), 720):
            for values in itertools.islice(itertools.product(*ways), 60):
                yield {list(data)[index]: values[index] for index in order}
    elif isinstance(data, list):
        ways = [list(itertools.islice(_orders(value), 24)) for value in data]
        yield from (list(values) for values in itertools.islice(itertools.product(*ways), 60))
    else:
        yield data


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
