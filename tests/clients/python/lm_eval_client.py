"""lm-evaluation-harness: a task of its own is judged by log-likelihoods, rolling ones and generated text."""

from pathlib import Path

from features import BASE_URL, WRITER, report
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

TOKENIZER = str(Path(__file__).parents[3] / "examples" / "models" / "kvasir-python-7m")
PAIRS = [("import os\nimport ", "sys"), ("def main(", ") -> None:")]


def model() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        model=WRITER, base_url=f"{BASE_URL}/completions", tokenizer=TOKENIZER, max_length=512, batch_size=2,
        max_retries=1,
    )  # fmt: skip


def instances(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def loglikelihood() -> None:
    """By echo with logprobs of the prompt."""
    answers = model().loglikelihood(instances("loglikelihood", *PAIRS))
    assert all(value < 0 for value, is_greedy in answers)


def rolling() -> None:
    asked = instances("loglikelihood_rolling", *[("".join(pair),) for pair in PAIRS])
    assert all(value < 0 for value in model().loglikelihood_rolling(asked))


def generate() -> None:
    asked = instances("generate_until", *[(context, {"until": ["\n"], "max_gen_toks": 8}) for context, _ in PAIRS])
    assert len(model().generate_until(asked)) == 2


def chat() -> None:
    chats = LocalChatCompletion(model=WRITER, base_url=f"{BASE_URL}/chat/completions", max_retries=1)
    text = chats.apply_chat_template([{"role": "user", "content": "Write a function."}])
    assert chats.generate_until(instances("generate_until", (text, {"max_gen_toks": 8})))[0]


if __name__ == "__main__":
    report(loglikelihood, rolling, generate, chat)
