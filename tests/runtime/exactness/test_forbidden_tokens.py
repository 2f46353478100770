"""`allowed_token_ids` and `bad_words`: greedy output is Hugging Face's under the same rule, and nothing that an engine
does besides changes it."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.conftest import NUM_NEW_TOKENS, Engine, EngineFactory, Features, Generated, Reference
from tests.runtime.exactness.speculators import METHODS, speculative_config
from transformers import AutoModelForCausalLM

from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.structured.grammars import regex_grammar

CUT = 9
SEEDS = (11, 12, 13)
ALLOWED = tuple(range(0, 320, 3))
NAMES = ("greedy", "allowed", "drawn", "drawn.1", "drawn.2", "beams", "beams.1")


def words_in(tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Of one, two, three and four tokens."""
    return ((tokens[3],), tuple(tokens[6:8]), tuple(tokens[10:13]), tuple(tokens[20:24]))


def holds(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[at : at + len(word)]) == tuple(word) for at in range(len(tokens)))


@torch.inference_mode()
def said(folder: Path, prompt: list[int], words: Sequence[Sequence[int]], allowed: Sequence[int] | None) -> list[int]:
    """By a model that is asked for one token at a time."""
    model, output = AutoModelForCausalLM.from_pretrained(folder).eval(), list[int]()
    while len(output) < NUM_NEW_TOKENS:
        logits = model(torch.tensor([prompt + output])).logits[0, -1]
        forbidden = [word[-1] for word in words if list(word[:-1]) == output[len(output) - len(word) + 1 :]]
        logits[forbidden] = float("-inf")
        if allowed is not None:
            logits[[token for token in range(len(logits)) if token not in allowed]] = float("-inf")
        output.append(int(logits.argmax()))
    return output


def add_all(engine: Engine, expected: Reference, begun: dict[str, list[int]]) -> Generated:
    words, prompt = words_in(expected.outputs[1]), expected.prompts[1]
    engine.add("greedy", prompt, begun.get("greedy", []), bad_words=words)
    engine.add("allowed", prompt, begun.get("allowed", []), allowed_token_ids=ALLOWED, bad_words=((ALLOWED[0],),))
    outputs = [begun.get(name, []) for name in NAMES[2:5]]
    drawn = {"temperature": 1.0, "repetition_penalty": 1.2, "allowed_token_ids": ALLOWED, "logprobs": 1}
    pairs = tuple(itertools.product(ALLOWED[:16], ALLOWED[16:48]))
    engine.add("drawn", expected.prompts[4], seeds=SEEDS, outputs=outputs, bad_words=pairs, **drawn)
    engine.add("beams", expected.prompts[3], seeds=range(2), beam=BeamSearch(width=2), bad_words=words)
    engine.add("free", expected.prompts[2])
    return engine.finish(*NAMES, "free")


def texts_of(generated: Generated) -> dict[str, list[int]]:
    return {name: generated.token_ids(name) for name in NAMES}


def test_output_is_the_references_under_the_same_rule(reference: Any, start_engine: EngineFactory) -> None:
    expected = reference("LlamaForCausalLM")
    generated, words = add_all(start_engine(expected.folder), expected, {}), words_in(expected.outputs[1])
    texts = texts_of(generated)
    assert texts["greedy"] == said(expected.folder, expected.prompts[1], words, None)
    assert not any(holds(texts[name], word) for name in ("greedy", "beams", "beams.1") for word in words)
    assert texts["allowed"] == said(expected.folder, expected.prompts[1], [ALLOWED[:1]], ALLOWED)
    assert set().union(*(texts[name] for name in NAMES[1:5])) <= set(ALLOWED)
    assert generated.token_ids("free") == expected.outputs[2]


def test_the_prompt_may_end_in_the_beginning_of_a_word(reference: Any, start_engine: EngineFactory) -> None:
    expected = reference("LlamaForCausalLM")
    engine = start_engine(expected.folder)
    engine.add("greedy", expected.prompts[1], bad_words=((expected.prompts[1][-1], expected.outputs[1][0]),))
    assert engine.finish("greedy").token_ids("greedy") == expected.outputs[1]


def test_a_grammar_comes_on_top(reference: Any, start_engine: EngineFactory) -> None:
    """Where both leave nothing, the request fails, and no other."""
    expected = reference("LlamaForCausalLM")
    engine = start_engine(expected.folder)
    held = {"grammar": regex_grammar("(ab|cd){4}"), "stop_token_ids": (300,)}
    engine.add("held", expected.prompts[1], **held, bad_words=((97,),))
    engine.add("stuck", expected.prompts[1], **held, allowed_token_ids=(97, 100))
    generated = engine.finish("held", "stuck")
    assert generated.token_ids("held") == [*b"cdcdcdcd", 300]
    assert generated.outputs["stuck"][-1].finish_reason == "error"
    assert "grammar" in generated.outputs["stuck"][-1].error


CASES: dict[str, tuple[Features, str | None, int]] = {
    "few_blocks": (Features(few_blocks=True), None, 0),
    "chunked": (Features(chunked=True, prefix_cache=True), None, 0),
    "resumed": (Features(), None, CUT),
    "resumed-ngram": (Features(three_steps_ahead=True), "ngram", CUT),
    "few_blocks-draft_model": (Features(few_blocks=True, one_step_ahead=True), "draft_model", 0),
    **{method: (Features(three_steps_ahead=True), method, 0) for method in METHODS},
}


@pytest.mark.parametrize(("features", "method", "cut"), CASES.values(), ids=CASES)
def test_nothing_else_changes_it(
    features: Features, method: str | None, cut: int, reference: Any, start_engine: EngineFactory, tmp_path: Path
) -> None:
    expected = reference("LlamaForCausalLM", "bfloat16")
    plain = texts_of(add_all(start_engine(expected.folder), expected, {}))
    config = None if method is None else speculative_config(method, expected.folder, expected.folder, tmp_path)
    engine = start_engine(expected.folder, features, **({} if config is None else {"speculative_config": config}))
    begun = {name: tokens[:cut] for name, tokens in plain.items() if not name.startswith("beams")}
    generated = add_all(engine, expected, begun)
    assert texts_of(generated) == {name: tokens[len(begun.get(name, [])) :] for name, tokens in plain.items()}
    assert (generated.stats.num_preemptions > 0) == features.few_blocks
    assert (generated.stats.num_draft_tokens > 0) == (method is not None)
