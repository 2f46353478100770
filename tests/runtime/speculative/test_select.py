"""What `--speculative-config` may ask for."""

from pathlib import Path

import pytest
import transformers
from tests.runtime.speculative.conftest import MAX_MODEL_LEN, PLACEMENT, SHAPE, Rank, make_llama, prompt

from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.config import SpeculativeConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.speculative.select import make_proposer


def make(target: Decoder, config: SpeculativeConfig) -> Rank:
    return Rank(target, make_proposer(config, target, PLACEMENT, ReferenceAttention(), MAX_MODEL_LEN))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookup_needs_no_model(target: Decoder, method: str) -> None:
    rank = make(target, SpeculativeConfig(method=method))  # type: ignore[arg-type]
    rank.add(0, prompt(3, seed=0) * 3)
    rank.step([], {0: 9}, num_proposals=4)
    assert rank.proposer.name == method


def test_a_draft_model_is_loaded_from_its_folder(tmp_path: Path, target: Decoder) -> None:
    make_llama(tmp_path, seed=1, num_hidden_layers=2)
    rank = make(target, SpeculativeConfig(method="draft_model", model=str(tmp_path)))
    assert len(rank.proposer.kv_specs) == 2


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path, target: Decoder) -> None:
    make_llama(tmp_path, seed=1, vocab_size=77)
    with pytest.raises(ConfigurationError, match="vocabulary of 77 tokens and the target one of 61"):
        make(target, SpeculativeConfig(method="draft_model", model=str(tmp_path)))


def test_a_draft_model_with_windows_is_refused(tmp_path: Path, target: Decoder) -> None:
    config = transformers.MistralConfig(**SHAPE, architectures=["MistralForCausalLM"], sliding_window=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="has sliding-window layers, which cannot catch up"):
        make(target, SpeculativeConfig(method="draft_model", model=str(tmp_path)))
