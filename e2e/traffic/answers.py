"""What the example model gives at temperature 0, by Hugging Face's code in float32: the yardstick for every stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[2] / "examples" / "models"
PROMPTS = ("import os\n", "class Stack:\n    def __init__(self", "def parse(text, ", "for name in sorted(")


@dataclass(frozen=True)
class Answer:
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str


@cache
def answers(num_tokens: int, model: str = "kvasir-python-7m", prompts: Sequence[str] = PROMPTS) -> tuple[Answer, ...]:
    """Greedy continuations of `num_tokens` tokens, ends of text included as any other token."""
    tokenizer, network = load(model)
    found = []
    for prompt in prompts:
        prompt_token_ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
        output = network.generate(
            torch.tensor([prompt_token_ids]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        token_ids: list[int] = output[0, len(prompt_token_ids) :].tolist()
        text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found.append(Answer(prompt_token_ids, token_ids, text))
    return tuple(found)


def chat_answer(question: str, num_tokens: int, model: str = "kvasir-python-7m") -> str:
    """The answer to one message by the model's chat template, of `num_tokens` tokens at most."""
    tokenizer, network = load(model)
    messages = [{"role": "user", "content": question}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(messages, **options)
    output = network.generate(**prompt, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@cache
def load(model: str) -> tuple[Any, Any]:
    """Tokenizer and network, whose own types say less than they do."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / model)
    return tokenizer, AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32)
