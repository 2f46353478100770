"""Greedy output that follows a grammar is that of Hugging Face's generate with the same mask, token for token."""

from collections.abc import Sequence
from typing import Any

import llguidance
import pytest
import torch
from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable
from transformers import AutoModelForCausalLM, LogitsProcessor

from kvasir_runtime.structured.grammars import ebnf_grammar, regex_grammar
from kvasir_runtime.structured.json_schema import json_schema_grammar

END = 300
MAX_TOKENS = 48
PROMPTS = (0, 2, 4)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": json_schema_grammar(SCHEMA, any_whitespace=False),
    "regex": regex_grammar("(ab|ba|[0-9]{2}){4,20}"),
    "ebnf": ebnf_grammar('root ::= "(" root ")" | [a-z] | root "+" root'),
}


class BytesOfTable:
    """Of `ByteTable`, as llguidance asks for it, with the token that ends an answer."""

    eos_token_id, bos_token_id = END, None
    tokens = tuple(bytes([token_id]) if token_id < 256 else b"\xff[%d]" % token_id for token_id in range(VOCAB_SIZE))
    special_token_ids = tuple(ByteTable.special_ids)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class Mask(LogitsProcessor):
    """Of one text."""

    def __init__(self, grammar: str, prompt_len: int) -> None:
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(BytesOfTable()), n_vocab=VOCAB_SIZE)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar)
        self._num_known = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._matcher.consume_tokens(input_ids[0, self._num_known :].tolist())
        self._num_known = input_ids.shape[1]
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits.unsqueeze(1) >> torch.arange(8) & 1).flatten()[:VOCAB_SIZE].bool()
        return scores.masked_fill(~allowed, -torch.inf)


@torch.inference_mode()
def held(model: Any, prompt: Sequence[int], grammar: str) -> list[int]:
    """What Hugging Face says, up to the end."""
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=END,
        pad_token_id=END, logits_processor=[Mask(grammar, len(prompt))],
    )  # fmt: skip
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_what_a_grammar_holds_is_what_hugging_face_says_with_its_mask(
    architecture: str, reference: Any, start_engine: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    model = AutoModelForCausalLM.from_pretrained(expected.folder).eval()
    engine = start_engine(expected.folder)
    asked = [(name, index) for name in GRAMMARS for index in PROMPTS]
    names = [f"{name}-{index}" for name, index in asked]
    for name, index in asked:
        engine.add(f"{name}-{index}", expected.prompts[index], grammar=GRAMMARS[name], max_tokens=MAX_TOKENS,
                   stop_token_ids=(END,))  # fmt: skip
    generated = engine.finish(*names)
    answers = [held(model, expected.prompts[index], GRAMMARS[name]) for name, index in asked]
    assert [generated.token_ids(name) for name in names] == answers
    assert any(answer[-1] == END for answer in answers)
