"""The committed example models are what their README says: loadable offline, small, lossless, and really trained."""

from pathlib import Path

import pytest
import torch
from tests.runtime.exactness.conftest import BLOCK_SIZE, PLAIN, engine_over
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.speculative.depth import FixedDepth
from kvasir_runtime.speculative.select import proposer_of

MODELS = Path(__file__).parents[2] / "examples" / "models"
TARGET, DRAFT = MODELS / "kvasir-python-7m", MODELS / "kvasir-python-700k"
MAX_FOLDER_BYTES = 20_000_000
# An untrained model has a perplexity of about 4096 here, the size of the vocabulary.
MAX_PERPLEXITY = {TARGET: 8.0, DRAFT: 12.0}

UNSEEN_CODE = '''
class Counter:
    """Count how often each word occurs."""

    def __init__(self, words=None):
        self.counts = {}
        if words is not None:
            self.update(words)

    def update(self, words):
        for word in words:
            self.counts[word] = self.counts.get(word, 0) + 1

    def __len__(self):
        return len(self.counts)

    def __repr__(self):
        return "%s(%r)" % (self.__class__.__name__, self.counts)
'''

AWKWARD_TEXTS = (
    "",
    " leading and trailing  ",
    "don 't tidy , this !",
    "tab\tcarriage\r\nreturn\n\n\n        indent",
    "\x00 control, caf\u00e9, cafe\u0301, \u65e5\u672c\u8a9e, \U0001f40d",
    "<|im_start|>user\nhello<|im_end|>\n",
)


@pytest.fixture(scope="module", params=[TARGET, DRAFT], ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_folder_stays_under_the_size_limit(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_FOLDER_BYTES


@pytest.mark.parametrize(("folder", "low", "high"), [(TARGET, 5_000_000, 8_000_000), (DRAFT, 500_000, 900_000)])
def test_parameter_count_is_that_of_its_name(folder: Path, low: int, high: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert low < model.num_parameters() < high
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_tokenizer_gives_any_text_back_unchanged(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_draft_shares_the_tokenizer_of_the_target() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (DRAFT / name).read_bytes() == (TARGET / name).read_bytes()


def test_generation_ends_at_the_end_of_text_or_of_a_turn(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert model.generation_config.eos_token_id == ends


def test_perplexity_of_unseen_code_shows_training(folder: Path) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(UNSEEN_CODE, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        perplexity = model(input_ids=ids, labels=ids).loss.exp().item()
    assert perplexity < MAX_PERPLEXITY[folder]


def test_draft_often_proposes_what_the_target_writes() -> None:
    ids = AutoTokenizer.from_pretrained(TARGET)(UNSEEN_CODE, return_tensors="pt").input_ids
    with torch.no_grad():
        target, draft = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits.argmax(-1)
            for folder in (TARGET, DRAFT)
        )
    assert (target == draft).float().mean().item() > 0.6


@pytest.mark.parametrize(("method", "least"), [("draft_model", 2.2), ("medusa", 1.3), ("eagle", 1.6), ("eagle3", 1.8)])
def test_drafts_in_the_engine_bring_more_than_a_token_a_step(method: str, least: float) -> None:
    folder = DRAFT if method == "draft_model" else TARGET.with_name(f"{TARGET.name}-{method}")
    speculation = SpeculativeConfig(method=method, model=str(folder), num_speculative_tokens=4)  # type: ignore[arg-type]
    execution = ExecutionConfig(num_threads=1, speculative_config=speculation)
    worker = load_worker(
        ModelConfig(model=str(TARGET), max_model_len=256, device="cpu"),
        CacheConfig(block_size=BLOCK_SIZE),
        execution,
        SchedulerConfig(max_num_seqs=8),
        proposer_of(execution),
    )
    ids = AutoTokenizer.from_pretrained(TARGET)(UNSEEN_CODE).input_ids
    executor = Executor(worker.runner, worker.prepare_thread)
    try:
        engine = engine_over(executor, worker.description, PLAIN, FixedDepth(4))
        names = [str(length) for length in range(16, len(ids), 16)]
        for name in names:
            engine.add(name, ids[: int(name)])
        generated = engine.finish(*names)
    finally:
        executor.close()
    assert all(generated.outputs[name][-1].finish_reason == "length" for name in names)
    stats = generated.stats
    acceptance_length = 1 + stats.num_accepted_tokens / stats.num_drafts
    print(f"{method}: {acceptance_length:.2f} tokens a step, {stats.num_accepted_per_position} of {stats.num_drafts}")
    assert acceptance_length > least


def test_target_answers_a_chat_with_python_and_ends_its_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    question = [{"role": "user", "content": "Write a function `is_valid(name)`."}]
    prompt = str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, do_sample=False, max_new_tokens=64)  # type: ignore[misc]
    answer = str(tokenizer.decode(output[0, ids.shape[1] :]))
    assert "def is_valid(name):" in answer
    assert answer.endswith("<|im_end|>")
