"""Greedy output that follows a grammar is that of Hugging Face's generate with the same mask, token for token."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import llguidance
import pytest
import torch
from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable
from tests.runtime.exactness.held_answers import END, HELD, PROMPT
from transformers import AutoModelForCausalLM, LogitsProcessor

MAX_TOKENS = 48
GRAMMARS = {kind: asked for kind, asked in HELD.items() if "budget" not in kind}
"""llguidance's own matcher counts nothing."""


class BytesOfTable:
    """Of `ByteTable`, as llguidance asks for it, with the token that ends an answer."""

    eos_token_id, bos_token_id = END, None
    tokens = tuple(bytes([token_id]) if token_id < 256 else b"\xff[%d]" % token_id for token_id in range(VOCAB_SIZE))
    special_token_ids = tuple(ByteTable.special_ids)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class Mask(LogitsProcessor):
    """Of one text, behind biases."""

    def __init__(self, grammar: str, bias: dict[int, float], prompt_len: int) -> None:
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(BytesOfTable()), n_vocab=VOCAB_SIZE)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar)
        self._bias = bias
        self._num_known = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._matcher.consume_tokens(input_ids[0, self._num_known :].tolist())
        self._num_known = input_ids.shape[1]
        for token_id, bias in self._bias.items():
            scores[0, token_id] += bias
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits.unsqueeze(1) >> torch.arange(8) & 1).flatten()[:VOCAB_SIZE].bool()
        return scores.masked_fill(~allowed, -torch.inf)


@torch.inference_mode()
def held(model: Any, prompt: Sequence[int], asked: dict[str, Any]) -> list[int]:
    """What Hugging Face says, up to the end."""
    ids, mask = torch.tensor([prompt]), Mask(asked["grammar"], asked.get("logit_bias", {}), len(prompt))
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=END,
        pad_token_id=END, logits_processor=[mask],
    )  # fmt: skip
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_what_a_grammar_holds_is_what_hugging_face_says_with_its_mask(
    architecture: str, random_model: Any, start_engine: Any
) -> None:
    folder = random_model(f"{architecture}ForCausalLM", "float32")
    model, engine = AutoModelForCausalLM.from_pretrained(folder).eval(), start_engine(folder)
    for kind, asked in GRAMMARS.items():
        engine.add(kind, PROMPT, **asked | {"min_tokens": 0, "max_tokens": MAX_TOKENS, "stop_token_ids": (END,)})
    generated = engine.finish(*GRAMMARS)
    answers = {kind: held(model, PROMPT, asked) for kind, asked in GRAMMARS.items()}
    assert {kind: generated.token_ids(kind) for kind in GRAMMARS} == answers
    assert sum(answer[-1] == END for answer in answers.values()) > len(GRAMMARS) // 4


def test_steps_without_a_grammar_call_nothing_of_it(reference: Any, start_engine: Any) -> None:
    expected = reference("LlamaForCausalLM")
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        called[Path(frame.f_code.co_filename).name] += event == "call"

    threading.setprofile(note)  # for the thread that runs steps
    try:
        engine = start_engine(expected.folder)
    finally:
        threading.setprofile(None)
    num_calls = {}
    for name, asked in {"plain": {}, "held": {"grammar": HELD["regex"]["grammar"], "stop_token_ids": (END,)}}.items():
        engine.add(name, expected.prompts[0], **asked)
        engine.step_until(lambda name=name: name in engine.channel.outputs)  # it has a row
        called.clear()
        engine.finish(name)
        assert called["model_runner.py"] > 0
        num_calls[name] = called["grammar_mask.py"] + called["vocabulary.py"]
    assert num_calls["plain"] == 0
    assert num_calls["held"] > 0
