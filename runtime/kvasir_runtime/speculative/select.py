"""Makes the proposer that `--speculative-config` asks for, or says what is wrong with what it asks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvasir_runtime.attention.backend import AttentionBackend
from kvasir_runtime.config import ExecutionConfig, SpeculativeConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.draft_model import DraftModelProposer
from kvasir_runtime.speculative.eagle import EagleProposer
from kvasir_runtime.speculative.eagle_heads import load_eagle1, load_eagle3
from kvasir_runtime.speculative.medusa import load_medusa
from kvasir_runtime.speculative.ngram import NgramProposer
from kvasir_runtime.speculative.proposer import Proposer
from kvasir_runtime.speculative.suffix import SuffixProposer


def proposer_of(
    execution: ExecutionConfig,
) -> Callable[[Decoder, Placement, AttentionBackend, int], Proposer] | None:
    """What makes the proposer once the target is loaded; None: no speculation."""
    speculative = execution.speculative_config
    return None if speculative is None else partial(make_proposer, speculative)


def make_proposer(
    config: SpeculativeConfig, target: Decoder, placement: Placement, backend: AttentionBackend, max_model_len: int
) -> Proposer:
    """The target's attention backend serves the draft's own layers too; `config` has passed `check_values`.

    Raises ConfigurationError, ModelLoadError.
    """
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer()
    assert config.model is not None, "all other methods need one"
    folder = Path(config.model)
    if config.method == "medusa":
        return load_medusa(folder, target, placement, config.num_speculative_tokens)
    if config.method == "eagle":
        return EagleProposer("eagle", load_eagle1(folder, target, placement, max_model_len), backend)
    if config.method == "eagle3":
        return EagleProposer("eagle3", load_eagle3(folder, target, placement, max_model_len), backend)
    return DraftModelProposer(_load_draft(folder, target, placement, max_model_len), backend, placement.dtype)


def _load_draft(folder: Path, target: Decoder, placement: Placement, max_model_len: int) -> Decoder:
    """The two vocabularies must be one; that the tokenizers agree is the user's promise. Raises ConfigurationError."""
    options = read_options(read_config(folder))
    if options.vocab_size != target.options.vocab_size:
        raise ConfigurationError(
            f"the draft model {folder} has a vocabulary of {options.vocab_size} tokens and the target one of "
            f"{target.options.vocab_size}: choose a draft model with the target's tokenizer"
        )
    if any(layer.attention.window is not None for layer in options.layers):
        raise ConfigurationError(
            f"the draft model {folder} has sliding-window layers, which cannot catch up once the window's blocks are "
            "freed: choose a draft model with full attention"
        )
    with Checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint, options, placement, max_model_len)
