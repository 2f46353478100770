"""The vocabulary shared out among tensor ranks: each embeds its own tokens, and computes their logits.

The last rank has fewer tokens where they do not share out evenly, or none.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Shard
from kvasir_runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    tensor: Collectives
    vocab_size: int

    @property
    def shard(self) -> Shard:
        return Shard(0, self.tensor.rank, self.tensor.size, may_be_uneven=True)

    @property
    def token_ids(self) -> range:
        """This rank's."""
        return self.shard.part(self.vocab_size)

    def embed(self, token_ids: Tensor, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows [n, hidden_size] of token ids int64 [n]; `rows_of` finds this rank's, counted from its first."""
        own = token_ids - self.token_ids.start
        is_other = (own < 0) | (own >= len(self.token_ids))
        rows = rows_of(own.masked_fill(is_other, 0))
        return self.tensor.all_reduce(rows.masked_fill_(is_other.unsqueeze(-1), 0))

    def join(self, logits: Tensor) -> Tensor:
        """Logits [n, vocab_size] on every rank, from each one's own."""
        most = -(-self.vocab_size // self.tensor.size)
        padded = logits if logits.shape[-1] == most else functional.pad(logits, (0, most - logits.shape[-1]))
        return self.tensor.all_gather(padded, dim=-1)[..., : self.vocab_size]


@dataclass(frozen=True, slots=True)
class VocabularyParallelHead:
    """Logits of the whole vocabulary on every rank."""

    linear: Linear
    part: VocabularyPart

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.part.join(self.linear(hidden))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table of its own, or of the head's weight where the two are tied."""

    table: Tensor | Linear
    scale: float | None
    part: VocabularyPart | None = None
    """None: the table holds the whole vocabulary."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self._rows(token_ids) if self.part is None else self.part.embed(token_ids, self._rows)
        return rows if self.scale is None else rows * self.scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        return self.table.rows(token_ids) if isinstance(self.table, Linear) else self.table[token_ids]
