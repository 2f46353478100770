"""The vocabulary that a rank's grammars are followed by."""

from pathlib import Path

from kvasir_runtime.config import ModelConfig
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.structured.vocabulary import Vocabulary


def load_vocabulary(model: ModelConfig, vocab_size: int) -> Vocabulary:
    """For a model with so many logits. Raises ModelLoadError."""
    return Vocabulary(Tokenizer.load(Path(model.tokenizer or model.model)), vocab_size)
