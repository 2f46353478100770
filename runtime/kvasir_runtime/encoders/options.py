"""What distinguishes one encoder from another, as plain data, and what its checkpoints call its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.models.rope import RopeOptions

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerOptions:
    half_window: int | None
    """Tokens on either side that a token sees; None: all."""
    rope: RopeOptions | None
    """None: positions are told by the embedding."""
    norms_input: bool
    """Of attention, where norms come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    max_length: int
    """Tokens of a text."""
    num_positions: int
    """Of learned ones; 0: there are none."""
    first_position: int
    """Of a text's first token, among those."""
    num_types: int
    """Of texts that are told apart; 0: none are."""
    layers: tuple[EncoderLayerOptions, ...]
    norm_eps: float
    norm_bias: bool
    norms_first: bool
    """Before a sublayer, and once after the last; else after each has joined the residual stream."""
    attention_bias: bool
    mlp_bias: bool
    is_gated: bool
    """down(activation(gate(x)) * up(x)), else down(activation(up(x)))."""
    activation: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Modules of an encoder, below its prefix; of a layer, below the layer's."""

    prefix: str
    """Of checkpoints that have a head besides."""
    embedding: str
    positions: str | None
    types: str | None
    embedding_norm: str
    layers: str
    qkv: tuple[str, str, str]
    """Parts of one name lie in one tensor."""
    attention_output: str
    attention_norm: str
    up: tuple[str, ...]
    """Of a gated one two parts, the gate first."""
    down: str
    mlp_norm: str
    final_norm: str | None
    unused: tuple[str, ...]
    """What checkpoints may hold besides, which makes no vectors."""
