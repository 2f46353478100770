"""The one attention call that every backend answers, for batches that mix prefill chunks and decodes.

Query token i of a request sits at position `seq_len - query_len + i` and sees the keys at or before it. Keys and values
of the step are written before attention reads them, so requests of one step may share blocks that it fills.

A backend prepares once a step (`prepare`), and each layer then calls the step that it got.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from kvasir_runtime.kernels.inputs import StepLengths

NO_EXTRAS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DecodeBounds:
    """The most decodes of any step: they size what a backend keeps, and fix shapes that must not follow the batch."""

    max_num_decodes: int
    max_query_len: int
    """One token and the most drafts."""

    @property
    def max_num_tokens(self) -> int:
        return self.max_num_decodes * self.max_query_len


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """One KV group's part of a step."""

    block_table: Tensor  # int32 [max_num_seqs, max_blocks], of all rows; request i reads row `rows[i]`
    slots: Tensor  # int64 [num_tokens], block_id * block_size + offset; -1: not written


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens of one step on the device, request after request, the decodes first.

    Block-table entries behind a group's window may name any page, and pages may hold anything, NaN included: whatever
    is not seen must not be loaded, or be masked before it is multiplied.
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    query_starts: Tensor  # int32 [num_requests + 1], first token of each request, then the number of tokens
    seq_lens: Tensor  # int32 [num_requests], tokens in the KV cache including this step's
    rows: Tensor  # int32 [num_requests]
    groups: tuple[GroupInputs, ...]
    lengths: StepLengths
    """What the host knows of the step's shape, without asking the device."""
    extras: Mapping[str, Tensor] = field(default_factory=lambda: NO_EXTRAS)
    """What else layers may read of each token, by name: buffers [most tokens, ...] whose first lines are the step's.
    They stay where they are, so graphs read them in place; what lies behind the step is left from another."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a KV spec has in the KV buffer: views with strides, [num_blocks, block_size, num_kv_heads, size of one]."""

    key: Tensor
    value: Tensor
    group: int
    key_scale: Tensor | None = None  # float32 [num_blocks, block_size, num_kv_heads]
    """Factor of each head's numbers; None: not quantised."""
    value_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms over each head's numbers, before the rotation (Qwen3, Gemma 3)."""

    query_weight: Tensor  # [head_dim]
    key_weight: Tensor
    eps: float


class AttentionStep(Protocol):
    """A backend bound to one step; layers call it in turn."""

    @property
    def inputs(self) -> StepInputs: ...

    def rotate_and_write(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,
        cache: LayerCache,
        cos: Tensor,  # float32 [num_positions, rotary_dim]
        sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Normalise (where asked for) and turn query and key, store key and value in their slots; the query, which may
        be a new tensor or the one given, changed in place."""

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        cache: LayerCache,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention [num_tokens, num_heads, size of a value], contiguous; `window` counts the keys seen, the
        token's own included, `softcap` bounds the logits."""


class AttentionBackend(Protocol):
    name: str

    def prepare(self, inputs: StepInputs) -> AttentionStep:
        """What all layers share in one step. Called once a step, before the first layer."""
