"""Chats with the example model, and what Hugging Face's greedy decoding answers: every service must say the same."""

from pathlib import Path

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_FOLDER = Path(__file__).parents[2] / "examples" / "models" / "kvasir-python-7m"
CHATS = [
    "Write a function `is_prime` that tells whether a number is prime.",
    "Write a function `flatten` that flattens a list of lists.",
    "What does `os.path.join` do?",
]
NUM_TOKENS = 64


def greedy_answers() -> dict[str, str]:
    """To each chat, in float32 as the examples serve it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
    answers = {}
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
        answers[chat] = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def ask(model: str, client: openai.OpenAI, chat: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": chat}], temperature=0, max_tokens=NUM_TOKENS
    )
    return answer.choices[0].message.content or ""


def stream(model: str, client: openai.OpenAI, chat: str) -> str:
    chunks = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": chat}], temperature=0, max_tokens=NUM_TOKENS, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
