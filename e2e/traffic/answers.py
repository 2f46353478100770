"""What the example model gives at temperature 0, by Hugging Face's code in float32: the yardstick for every stream."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from e2e.cluster.rig.cache import CACHE, made_once
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[2] / "examples" / "models"
LONGEST = 1900
FILE = "answers.json"
PROMPTS = ("import os\n", "class Stack:\n    def __init__(self", "def parse(text, ", "for name in sorted(")


@dataclass(frozen=True)
class Answer:
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    next_turn: "Answer | None" = None
    """What the same client asks for when this one has ended, under the same cache salt."""


@cache
def answers(
    num_tokens: int, model: str = "kvasir-python-7m", prompts: Sequence[str] = PROMPTS, num_given: int = 0
) -> tuple[Answer, ...]:
    """Greedy continuations of `num_tokens` tokens, ends of text included as any other token.

    The first `num_given` of a continuation belong to the prompt, for prompts of many blocks; both numbers together are
    at most LONGEST.
    """
    tokenizer, _ = load(model)
    found = []
    for prompt in prompts:
        continued = continuations(model)[prompt]
        token_ids = continued[num_given : num_given + num_tokens]
        text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        prompt_token_ids = tokenizer.encode(prompt, add_special_tokens=False) + continued[:num_given]
        found.append(Answer(prompt_token_ids, token_ids, text))
    return tuple(found)


@cache
def continuations(model: str) -> dict[str, list[int]]:
    """Of each of PROMPTS, LONGEST tokens. A machine works them out once for a model and a release of the libraries."""
    question = repr((PROMPTS, LONGEST, torch.__version__, transformers.__version__)).encode()
    key = hashlib.sha256(question + digest(MODELS / model)).hexdigest()[:16]

    def work_out(folder: Path) -> None:
        (folder / FILE).write_text(json.dumps({prompt: continuation(prompt, model) for prompt in PROMPTS}))

    known: dict[str, list[int]] = json.loads((made_once(CACHE / f"answers-{key}", work_out) / FILE).read_text())
    return known


def continuation(prompt: str, model: str) -> list[int]:
    tokenizer, network = load(model)
    prompt_token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    options = {"max_new_tokens": LONGEST, "do_sample": False, "eos_token_id": None}
    output = network.generate(torch.tensor([prompt_token_ids]), **options)
    token_ids: list[int] = output[0, len(prompt_token_ids) :].tolist()
    return token_ids


def digest(model: Path) -> bytes:
    files = sorted(file for file in model.iterdir() if file.is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).digest()


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
    torch.set_num_threads(1)  # one core does a step this small as fast, and waits for no other that the cluster has
    tokenizer = AutoTokenizer.from_pretrained(MODELS / model)
    return tokenizer, AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32)
