"""Every pair of features: greedy output is the reference's, sampled output and beams are those of the plain engine, to
the last bit in bfloat16, whatever else is on."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.all_kinds import END, HELD, HELD_SEEDS, WORDS
from tests.runtime.exactness.conftest import (
    NUM_NEW_TOKENS,
    SMALLEST_MARGIN,
    TOLERANCES,
    Dtype,
    Engine,
    EngineFactory,
    Features,
    Generated,
    Reference,
    said_alone,
)
from tests.runtime.exactness.repeating_heads import REPEATING_HEADS, repeating_draft
from tests.runtime.exactness.speculators import METHODS, speculative_config
from transformers import AutoModelForCausalLM

from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.structured.grammars import regex_grammar
from kvasir_runtime.structured.thoughts import Thought, behind_a_thought
from kvasir_runtime.talk.formats import FORMATS
from kvasir_runtime.talk.grammar import CallableTool, calls_grammar

SWITCHES = ("prefix_cache", "chunked", "few_blocks")
AHEAD = ("one_step_ahead", "three_steps_ahead")
REQUESTS = ("resumed", "several", "beams", "grammar")
FEATURES = (*SWITCHES, *AHEAD, *REQUESTS, "windows", *METHODS)
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not set(pair) <= set(METHODS) and not set(pair) <= set(AHEAD)
]
CASES = [
    *(pytest.param("bfloat16", pair, id="+".join(pair)) for pair in PAIRS),
    *(
        pytest.param(
            "float32", pair, id="+".join(pair) + "-float32", marks=() if "chunked" in pair else pytest.mark.slow
        )
        for pair in PAIRS
    ),
]
"""In float32 the short suite runs each feature with one other."""
GREEDY = (0, 2, 4, 5)
SCORED = ("greedy-2", "repetitive")
"""Greedy requests that ask for log-probabilities, and so take another way through the engine than plain tokens do."""
SAMPLING: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 20,
    "stop_token_ids": tuple(range(60)), "logprobs": 1,
}  # fmt: skip
SEEDS = (11, 12, 13)
WEATHER = CallableTool("weather", {"type": "object", "properties": {"city": {"type": "string"}}}, is_strict=True)
CALLS = calls_grammar(
    FORMATS["hermes"],
    [WEATHER],
    is_required=True,
    is_parallel=True,
    special_ids={"<tool_call>": 301, "</tool_call>": 302},
)
HELD_ASKED: dict[str, dict[str, Any]] = {
    "held-greedy": HELD | {"temperature": 0.0, "min_tokens": 0},
    "held": HELD,
    "calls": HELD | {"grammar": CALLS},
}
HELD_NAMES = [name for request in HELD_ASKED for name in (request, f"{request}.1")]
CUT = 9
SAMPLED: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {
    ("resumed",): {"sampled": (CUT,)},
    ("several",): {"several": (0, 0, 0)},
    ("resumed", "several"): {"all-resumed": (CUT, 1, 4), "first-resumed": (CUT, 0, 0), "one-resumed": (0, CUT, 0)},
}
"""By the features of a pair the sampled requests, with the tokens that each of their sequences has already."""
WIDTH = 2
STEPS_AHEAD = {"one_step_ahead": 1, "three_steps_ahead": 3}
LEAST_DISTINCT = 6
"""Tokens of a repetitive text: of fewer every draft would hold."""
LOOKUPS = ("ngram", "suffix")
LEAST_ACCEPTED = 5
"""Drafts of heads that hold where a text repeats itself; those of random heads hold once or twice."""


@dataclass(frozen=True)
class Plain:
    """What the plain engine says where Hugging Face cannot be asked: of each seed, and of each beam."""

    sampled: list[list[int]]
    scores: list[list[float]]
    beams: list[list[int]]
    held: list[list[int]]


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="session")
def plain_answers() -> dict[Path, Plain]:
    """By model, once they have been asked for."""
    return {}


@pytest.fixture(scope="session")
def repetitive(reference: Any) -> Callable[[str, Dtype], Reference]:
    """A prompt of an architecture that says three tokens again and again, of which the output then repeats itself too:
    so that looking up what came before finds something, and sometimes the right thing."""

    @functools.cache
    @torch.inference_mode()
    def of(architecture: str, dtype: Dtype) -> Reference:
        folder = reference(architecture, dtype).folder
        if dtype != "float32":
            return said_alone(folder, of(architecture, "float32").prompts)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        prompts = torch.randint(320, (48, 3), generator=torch.Generator().manual_seed(4)).repeat(1, 8)
        mask, length = torch.ones_like(prompts), prompts.shape[1]
        tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        logits = model(tokens).logits
        best = logits[:, length - 1 :].topk(2).values
        is_clear = (best[..., 0] - best[..., 1]).amin(1) > SMALLEST_MARGIN
        num_distinct = {row: len(set(tokens[row, length:].tolist())) for row in is_clear.nonzero()[:, 0].tolist()}
        chosen = min((row for row in num_distinct if num_distinct[row] > LEAST_DISTINCT), key=num_distinct.__getitem__)
        row = tokens[chosen].tolist()
        return Reference(folder, [row[:length]], [row[length:]], [logits[chosen].log_softmax(-1)])

    return of


@pytest.mark.parametrize(("dtype", "pair"), CASES)
def test_two_features_at_once_change_nothing(
    dtype: Dtype,
    pair: tuple[str, str],
    reference: Any,
    repetitive: Any,
    start_engine: Any,
    heads: Path,
    plain_answers: dict[Path, Plain],
) -> None:
    architecture = "Gemma3" if "windows" in pair else "Llama"
    expected = reference(f"{architecture}ForCausalLM", dtype)
    if expected.folder not in plain_answers:
        plain_answers[expected.folder] = answers(start_engine(expected.folder), expected)
    plain = plain_answers[expected.folder]
    method = next((name for name in pair if name in METHODS), None)
    greedy = {f"greedy-{index}": (expected, index) for index in GREEDY}
    if method is not None:
        greedy["repetitive"] = (repetitive(f"{architecture}ForCausalLM", dtype), 0)
    cut = CUT if "resumed" in pair else 0
    sampled = SAMPLED.get(tuple(name for name in pair if name in ("resumed", "several")), {})

    engine = start(pair, method, expected, start_engine, heads / architecture / dtype)
    names = add_greedy(engine, greedy, cut) + add_sampled(engine, expected, plain, sampled)
    if "beams" in pair:
        names += add_beams(engine, expected)
    if "grammar" in pair:
        names += add_held(engine, expected, plain, cut)
    generated = engine.finish(*names)
    if "prefix_cache" in pair:  # what is asked at once is computed at once
        engine.add("again", expected.prompts[5])
        generated = engine.finish("again")
        assert generated.token_ids("again") == expected.outputs[5]

    check_greedy(generated, greedy, cut)
    check_sampled(generated, plain, sampled, TOLERANCES[dtype])
    if "beams" in pair:
        assert [generated.token_ids(name) for name in names_of("beams", WIDTH)] == plain.beams
    if "grammar" in pair:
        assert [generated.token_ids(name) for name in HELD_NAMES] == [tokens[cut:] for tokens in plain.held]
    check_features(engine, pair, generated)
    check_drafts(generated, method, is_target="windows" not in pair)


def test_what_a_grammar_holds_follows_it(reference: Any, start_engine: Any) -> None:
    """For min_tokens at least, unless it can only end."""
    expected = reference("LlamaForCausalLM", "bfloat16")
    engine = start_engine(expected.folder)
    engine.add("held", expected.prompts[1], seeds=HELD_SEEDS, **HELD)
    engine.add("short", expected.prompts[1], **HELD | {"grammar": regex_grammar("ab")})
    engine.add("endless", expected.prompts[1], **HELD | {"grammar": regex_grammar("ab"), "stop_token_ids": ()})
    generated = engine.finish("held", "held.1", "short", "endless")
    for tokens in (generated.token_ids("held"), generated.token_ids("held.1")):
        assert tokens.index(END) == len(tokens) - 1 >= HELD["min_tokens"]
        assert WORDS.fullmatch(bytes(tokens[:-1]).decode())
    assert generated.token_ids("short") == [*b"ab", END]
    assert generated.token_ids("endless")[:2] == [*b"ab"]
    assert len(generated.token_ids("endless")) == HELD["max_tokens"]


THOUGHT = Thought(opened="(", closed=")", is_open=True, token_ids={"(": 40, ")": 41}, max_tokens=10)
THINKING = HELD | {"grammar": behind_a_thought(regex_grammar("(ab|ba){9}"), THOUGHT), "logit_bias": {97: 100.0}}


def test_a_thought_ends_in_time_with_drafts_too(reference: Any, start_engine: Any, tmp_path: Path) -> None:
    """What repeats itself is drafted on beyond the last token that the thought may have."""
    expected = reference("LlamaForCausalLM", "bfloat16")
    lookup = speculative_config("ngram", expected.folder, expected.folder, tmp_path)
    plain, drafting = start_engine(expected.folder), start_engine(expected.folder, speculative_config=lookup)
    begun = [[*b"aaaaaaaaa"[:length]] for length in (0, 4, 8, 9)]
    texts = []
    for engine in (plain, drafting):
        engine.add("thoughts", expected.prompts[1], seeds=[21, 22, 23, 24], outputs=begun, **THINKING)
        generated = engine.finish(*names_of("thoughts", 4))
        texts.append([generated.token_ids(name) for name in names_of("thoughts", 4)])
    assert texts[0] == texts[1]
    assert [len(tokens) + new.index(41) for tokens, new in zip(begun, texts[1], strict=True)] == [10] * 4


def test_a_grammar_that_cannot_be_followed_ends_its_own_request_only(reference: Any, start_engine: Any) -> None:
    expected = reference("LlamaForCausalLM", "bfloat16")
    engine = start_engine(expected.folder)
    engine.add("none", expected.prompts[1], **HELD | {"grammar": "no grammar"})
    engine.add("strays", expected.prompts[1], [*b"abx"], **HELD)
    engine.add("held", expected.prompts[1], **HELD)
    generated = engine.finish("none", "strays", "held")
    for name in ("none", "strays"):
        assert generated.outputs[name][-1].finish_reason == "error"
        assert "grammar" in generated.outputs[name][-1].error
    assert generated.outputs["held"][-1].finish_reason == "stop"


def names_of(request: str, number: int) -> list[str]:
    return [request, *(f"{request}.{index}" for index in range(1, number))]


def answers(engine: Engine, expected: Reference) -> Plain:
    nothing = Plain([[] for _ in SEEDS], [], [], [[] for _ in HELD_NAMES])
    sampled, beams = add_sampled(engine, expected, nothing, SAMPLED["several",]), add_beams(engine, expected)
    generated = engine.finish(*sampled, *beams, *add_held(engine, expected, nothing, 0))
    return Plain(
        [generated.token_ids(name) for name in sampled],
        [scores(generated, name) for name in sampled],
        [generated.token_ids(name) for name in beams],
        [generated.token_ids(name) for name in HELD_NAMES],
    )


def scores(generated: Generated, name: str) -> list[float]:
    """Log-probabilities of a sequence's tokens."""
    return [entry.logprobs[0] for entry in generated.logprobs(name)]


def start(
    pair: tuple[str, str], method: str | None, expected: Reference, start_engine: EngineFactory, heads: Path
) -> Engine:
    features = Features(**{name: True for name in pair if name in (*SWITCHES, *AHEAD)})
    if method is None:
        return start_engine(expected.folder, features)
    draft = repeating_draft(heads / "draft", expected.folder) if "windows" in pair else expected.folder
    config = speculative_config(method, expected.folder, draft, heads, REPEATING_HEADS)
    return start_engine(expected.folder, features, speculative_config=config)


def add_greedy(engine: Engine, greedy: dict[str, tuple[Reference, int]], cut: int) -> list[str]:
    for name, (of, index) in greedy.items():
        engine.add(name, of.prompts[index], of.outputs[index][:cut], logprobs=2 if name in SCORED else None)
    return list(greedy)


def add_sampled(engine: Engine, expected: Reference, plain: Plain, sampled: dict[str, tuple[int, ...]]) -> list[str]:
    """Names of all sequences."""
    for name, cuts in sampled.items():
        outputs = [tokens[:cut] for tokens, cut in zip(plain.sampled, cuts, strict=False)]
        engine.add(name, expected.prompts[4], seeds=SEEDS[: len(cuts)], outputs=outputs, **SAMPLING)
    return [name for request, cuts in sampled.items() for name in names_of(request, len(cuts))]


def add_beams(engine: Engine, expected: Reference) -> list[str]:
    """Names of all hypotheses."""
    engine.add("beams", expected.prompts[3], seeds=range(WIDTH), beam=BeamSearch(width=WIDTH), max_tokens=40)
    return names_of("beams", WIDTH)


def add_held(engine: Engine, expected: Reference, plain: Plain, cut: int) -> list[str]:
    """Names of all sequences."""
    begun = iter(tokens[:cut] for tokens in plain.held)
    for name, asked in HELD_ASKED.items():
        outputs = [next(begun) for _ in HELD_SEEDS]
        engine.add(name, expected.prompts[1], seeds=HELD_SEEDS, outputs=outputs, **asked)
    return HELD_NAMES


def check_greedy(generated: Generated, greedy: dict[str, tuple[Reference, int]], cut: int) -> None:
    for name, (of, index) in greedy.items():
        of.check(generated, name, index, cut)
        assert bool(generated.logprobs(name)) == (name in SCORED)


def check_sampled(generated: Generated, plain: Plain, sampled: dict[str, tuple[int, ...]], tolerance: float) -> None:
    for request, cuts in sampled.items():
        for index, (name, cut) in enumerate(zip(names_of(request, len(cuts)), cuts, strict=True)):
            assert generated.token_ids(name) == plain.sampled[index][cut:], name
            assert scores(generated, name) == pytest.approx(plain.scores[index][cut:], abs=tolerance, rel=0), name


def check_features(engine: Engine, pair: tuple[str, str], generated: Generated) -> None:
    assert engine.most_steps_ahead == next((STEPS_AHEAD[name] for name in pair if name in AHEAD), 0)
    stats = generated.stats
    assert (stats.num_preemptions > 0) == ("few_blocks" in pair)
    if "few_blocks" in pair:
        assert all(engine.was_preempted(name) for name in {"several", "beams"} & set(pair))
    assert (stats.num_prefix_hits > 0) == ("prefix_cache" in pair)


def check_drafts(generated: Generated, method: str | None, *, is_target: bool) -> None:
    """`is_target`: whether a draft model is the target itself."""
    num_drafts, num_accepted = generated.stats.num_draft_tokens, generated.stats.num_accepted_tokens
    if method is None:
        assert num_drafts == 0
        return
    assert num_accepted >= (1 if method in LOOKUPS else LEAST_ACCEPTED)
    if method == "draft_model" and is_target:
        assert num_accepted > 0.4 * num_drafts, "a draft that is the target is right"
    else:
        assert num_accepted < num_drafts
