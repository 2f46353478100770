"""Medusa heads: head i guesses the token i + 2 places on from the target's last hidden state (Cai et al. 2024).

Each is a few residual blocks and an lm head; where a checkpoint brings no lm head, the target's serves. Only the chain
of each head's most likely token is drafted. The tensors' names say how many heads and blocks there are: published files
config.json say two heads where there are five.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.errors import CheckpointError, ConfigurationError
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint import SAFETENSORS, Checkpoint
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.module_loader import ModuleLoader, make_module_loader
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep

MEDUSA_FILES: Final = ("medusa_lm_head.safetensors", SAFETENSORS, "medusa_lm_head.pt")
"""Of its authors, of vLLM, and of its authors at first."""


@dataclass(frozen=True, slots=True)
class MedusaNames:
    """Modules of a public layout, by the head's number and the block's in it."""

    block: str
    lm_head: str
    """`{last}` is the number after the last block's."""

    def block_of(self, head: int, block: int) -> str:
        return self.block.format(head=head, block=block)

    def lm_head_of(self, head: int, num_blocks: int) -> str:
        return self.lm_head.format(head=head, last=num_blocks)


_LAYOUTS: Final = (
    MedusaNames("{head}.{block}.linear", "{head}.{last}"),  # FasterDecoding/Medusa
    MedusaNames("blocks.{head}.layers.{block}", "lm_heads.{head}"),  # vLLM
)


@dataclass(frozen=True, slots=True)
class MedusaHead:
    blocks: tuple[Linear, ...]
    to_logits: Callable[[Tensor], Tensor]
    token_map: Tensor | None
    """int64 [draft_vocab_size], the target's id of each token of the logits; None: the same."""

    def most_likely(self, hidden: Tensor) -> Tensor:
        """Token ids int64 [n] from hidden states [n, hidden_size]."""
        for linear in self.blocks:
            hidden = hidden + functional.silu(linear(hidden))
        token_ids = self.to_logits(hidden).argmax(-1)
        return token_ids if self.token_map is None else self.token_map[token_ids]


class MedusaProposer:
    name = "medusa"
    wants_hidden = True
    captured_layers: tuple[int, ...] = ()
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self, heads: Sequence[MedusaHead]) -> None:
        self._heads = heads

    def bind(self, setup: ProposerSetup) -> None:
        """Nothing of it is needed."""

    def propose(self, step: VerifiedStep) -> Tensor:
        hidden = step.hidden[step.last_accepted]
        return torch.stack([head.most_likely(hidden) for head in self._heads[: step.num_proposals]], 1).int()


def load_medusa(folder: Path, target: Decoder, placement: Placement, num_drafts: int) -> MedusaProposer:
    """Of a public checkpoint, which must have `num_drafts` heads. Raises ConfigurationError, ModelLoadError."""
    config = read_config(folder)
    options = replace(target.options, quantization=None)
    with Checkpoint(folder, MEDUSA_FILES) as checkpoint:
        names = _names_in(checkpoint)
        num_heads = _count(checkpoint, lambda head: names.block_of(head, 0))
        _check_fits(checkpoint, names, num_heads, num_drafts, target)
        loader = _HeadLoader(
            modules=make_module_loader(checkpoint, options, placement, num_positions=1),
            names=names,
            num_blocks=_count(checkpoint, lambda block: names.block_of(0, block)),
            target=target,
            token_map=_token_map(checkpoint, options.vocab_size, placement.device),
            shares_lm_head=config.flag("original_lm_head", False),
        )
        heads = [loader.head(index) for index in range(num_heads)]
        checkpoint.check_all_taken(ignored=())
    return MedusaProposer(heads)


def _names_in(checkpoint: Checkpoint) -> MedusaNames:
    """Raises CheckpointError."""
    firsts = {f"{names.block_of(0, 0)}.weight": names for names in _LAYOUTS}
    found = next((names for first, names in firsts.items() if first in checkpoint), None)
    if found is None:
        raise CheckpointError(f"{checkpoint.folder} holds no Medusa heads: expected a tensor {' or '.join(firsts)}")
    return found


def _count(checkpoint: Checkpoint, module_of: Callable[[int], str]) -> int:
    return next(number for number in count() if f"{module_of(number)}.weight" not in checkpoint)


def _check_fits(checkpoint: Checkpoint, names: MedusaNames, num_heads: int, num_drafts: int, target: Decoder) -> None:
    """Raises ConfigurationError."""
    if num_heads < num_drafts:
        raise ConfigurationError(
            f"{checkpoint.folder} holds {num_heads} Medusa heads, but num_speculative_tokens is {num_drafts}: "
            f"pass at most {num_heads}"
        )
    hidden_size = checkpoint.shape(f"{names.block_of(0, 0)}.weight")[-1]
    if hidden_size != target.options.hidden_size:
        raise ConfigurationError(
            f"{checkpoint.folder} holds Medusa heads for hidden states of size {hidden_size}, the target's have size "
            f"{target.options.hidden_size}: use heads that were trained on this model"
        )


def _token_map(checkpoint: Checkpoint, vocab_size: int, device: torch.device) -> Tensor | None:
    """Of vLLM's heads over the commonest tokens. Raises CheckpointError, ConfigurationError."""
    if "token_map" not in checkpoint:
        return None
    token_ids = checkpoint.take("token_map", checkpoint.shape("token_map")[:1]).long()
    if not bool(((token_ids >= 0) & (token_ids < vocab_size)).all()):
        raise ConfigurationError(
            f"{checkpoint.folder}: token_map names tokens outside the target's vocabulary of {vocab_size}: "
            "use heads that were trained on this model"
        )
    return token_ids.to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadLoader:
    modules: ModuleLoader
    names: MedusaNames
    num_blocks: int
    target: Decoder
    token_map: Tensor | None
    shares_lm_head: bool
    """Whether the first lm head is all heads'."""
    lm_heads: dict[str, Linear] = field(default_factory=dict)

    def head(self, index: int) -> MedusaHead:
        size, checkpoint = self.target.options.hidden_size, self.modules.checkpoint
        names = [self.names.block_of(index, block) for block in range(self.num_blocks)]
        blocks = tuple(
            self.modules.linear([name], [size], size, has_bias=f"{name}.bias" in checkpoint) for name in names
        )
        lm_head = self._lm_head_name(index)
        if lm_head is None:
            return MedusaHead(blocks, self.target.logits, None)
        token_map = self._token_map_of(lm_head)
        num_tokens = self.target.options.vocab_size if token_map is None else len(token_map)
        if lm_head not in self.lm_heads:
            self.lm_heads[lm_head] = self.modules.linear([lm_head], [num_tokens], size)
        return MedusaHead(blocks, self.lm_heads[lm_head], token_map)

    def _lm_head_name(self, index: int) -> str | None:
        """None: the target's serves."""
        own, first = (self.names.lm_head_of(head, self.num_blocks) for head in (index, 0))
        shared = ("lm_head", first) if self.shares_lm_head else ()
        return next((name for name in (own, *shared) if f"{name}.weight" in self.modules.checkpoint), None)

    def _token_map_of(self, lm_head: str) -> Tensor | None:
        """None of an lm head over the whole vocabulary, which a map would only make smaller."""
        is_whole = self.modules.checkpoint.shape(f"{lm_head}.weight")[0] == self.target.options.vocab_size
        return None if is_whole else self.token_map
