"""Medusa heads: head i guesses the token i + 2 places on from the target's last hidden state (Cai et al. 2024).

Each is a few residual blocks and an lm head; where a checkpoint brings no lm head, the target's serves. Only the chain
of each head's most likely token is drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.module_loader import ModuleLoader, make_module_loader
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep


@dataclass(frozen=True, slots=True)
class MedusaHead:
    blocks: tuple[Linear, ...]
    to_logits: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] from hidden states [n, hidden_size]."""
        for linear in self.blocks:
            hidden = hidden + functional.silu(linear(hidden))
        return self.to_logits(hidden)


class MedusaProposer:
    name = "medusa"
    wants_hidden = True
    captured_layers: tuple[int, ...] = ()
    is_catching_up = False
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self, heads: Sequence[MedusaHead]) -> None:
        self._heads = heads

    def bind(self, setup: ProposerSetup) -> None:
        """Nothing of it is needed."""

    def propose(self, step: VerifiedStep) -> Tensor:
        hidden = step.hidden[step.last_accepted]
        return torch.stack([head(hidden).argmax(-1) for head in self._heads[: step.num_proposals]], 1).int()


def load_medusa(folder: Path, target: Decoder, placement: Placement, num_drafts: int) -> MedusaProposer:
    """The first `num_drafts` heads of a public checkpoint. Raises ConfigurationError, ModelLoadError."""
    config = read_config(folder)
    num_heads, num_layers = config.integer("medusa_num_heads"), config.integer("medusa_num_layers", 1)
    if num_heads < num_drafts:
        raise ConfigurationError(
            f"{folder} holds {num_heads} Medusa heads, but num_speculative_tokens is {num_drafts}: "
            f"pass at most {num_heads}"
        )
    hidden_size = config.integer("hidden_size", target.options.hidden_size)
    if hidden_size != target.options.hidden_size:
        raise ConfigurationError(
            f"{folder} holds Medusa heads for hidden states of size {hidden_size}, the target's have size "
            f"{target.options.hidden_size}: use heads that were trained on this model"
        )
    options = replace(target.options, quantization=None)
    with Checkpoint(folder) as checkpoint:
        modules = make_module_loader(checkpoint, options, placement, num_positions=1)
        heads = [_load_head(modules, target, index, num_layers) for index in range(num_heads)]
        checkpoint.check_all_taken(ignored=())
    return MedusaProposer(heads)


def _load_head(modules: ModuleLoader, target: Decoder, index: int, num_layers: int) -> MedusaHead:
    size, vocab_size = target.options.hidden_size, target.options.vocab_size
    blocks = [modules.linear([f"{index}.{j}.linear"], [size], size, has_bias=True) for j in range(num_layers)]
    lm_head = f"{index}.{num_layers}"
    if f"{lm_head}.weight" not in modules.checkpoint:
        return MedusaHead(tuple(blocks), target.logits)
    return MedusaHead(tuple(blocks), modules.linear([lm_head], [vocab_size], size))
