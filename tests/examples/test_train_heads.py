"""The scripts that train draft heads write heads that the engine loads: a few steps for a target that knows nothing, on
text that says nothing. `continue_text.py`, which writes the text, takes minutes at any size, and is not run."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.speculative.select import proposer_of

SCRIPTS = Path(__file__).parents[2] / "examples" / "models"
COMMANDS = {
    "medusa": ("train_medusa.py",),
    "eagle": ("train_eagle.py",),
    "eagle3": ("train_eagle.py", "--eagle3"),
}
VOCAB_SIZE = 4096
PROMPT, CONTINUATION = 128, 16
"""Tokens of a row; the continuation is shorter than in earnest."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, num_key_value_heads=2, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `continue_text.py` writes, of a model that says every other token of the vocabulary once."""
    said = torch.arange(0, VOCAB_SIZE, 2).view(-1, CONTINUATION)
    prompts = torch.randint(VOCAB_SIZE, (len(said), PROMPT), generator=torch.Generator().manual_seed(2))
    rows = torch.cat([prompts, said], 1)
    file = tmp_path_factory.mktemp("text") / "text.pt"
    torch.save({"continued": rows, "corpus": rows[:4].clone(), "held_out": rows[:1].clone()}, file)
    return file


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", COMMANDS)
def test_a_trained_head_is_loaded(
    method: str,
    target: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, *options = COMMANDS[method]
    head = tmp_path / "head"
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, *options, str(target), str(head), "--text", str(text), "--steps", "2"])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert "step 2 loss" in capsys.readouterr().out

    speculation = SpeculativeConfig(method=method, model=str(head), num_speculative_tokens=4)  # type: ignore[arg-type]
    execution = ExecutionConfig(num_threads=1, speculative_config=speculation)
    scheduling = SchedulerConfig(max_num_seqs=2)
    model = ModelConfig(model=str(target), max_model_len=64, device="cpu")
    load_worker(model, CacheConfig(), execution, scheduling, proposer_of(execution))
