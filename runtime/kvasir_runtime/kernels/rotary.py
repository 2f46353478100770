"""Rotary position embedding (Su et al. 2021) in the half-split (GPT-NeoX) style, in place on query and key.

The first `rotary_dim` numbers of each head turn; the rest pass through (partial rotary).
"""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES


def rotary_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Turn query [T, Hq, D] and key [T, Hk, D] in place by their positions int64 [T].

    cos and sin are float32 [max_position, R], the second half of the columns equal to the first: number i of a head
    turns with number i + R / 2 by the angle of column i.
    """
    half = cos.shape[-1] // 2
    turn_cos = cos[positions, :half].unsqueeze(1)  # [T, 1, R / 2]
    turn_sin = sin[positions, :half].unsqueeze(1)
    for heads in (query, key):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = (first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin)
        heads[..., :half], heads[..., half : 2 * half] = turned[0].to(heads.dtype), turned[1].to(heads.dtype)


def cpu_rotary(
    library: CDLL,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """The compiled rotary embedding; query and key may be views into one packed projection."""
    native = library.kvasir_rotary

    def rotary(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> None:
        code = DTYPE_CODES.get(query.dtype)
        dense_tables = cos.is_contiguous() and sin.is_contiguous() and cos.dtype == torch.float32
        if code is None or not dense_tables or query.stride(2) != 1 or key.stride(2) != 1:
            rotary_reference(query, key, cos, sin, positions)
            return
        native(
            *(code, query.data_ptr(), query.stride(0), query.stride(1), query.shape[1]),
            *(key.data_ptr(), key.stride(0), key.stride(1), key.shape[1]),
            *(cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), query.shape[0], cos.shape[1] // 2),
        )

    return rotary
