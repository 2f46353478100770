"""What a layer does to each token by itself between its matrix products and attention.

Root-mean-square norms (Zhang and Sennrich 2019), alone and fused with the residual addition before them: the mean is
taken in float32 whatever the activations' type, and the weight is used as it is (the loader adds Gemma's 1). Gated
activations: silu(gate) * up and gelu_tanh(gate) * up on one packed input. And what happens to query, key and value
before attention, as one kernel: each head's norm where the architecture has one, the rotary embedding (Su et al. 2021;
the half-split style of GPT-NeoX), and the write into the paged cache.

The first `rotary_dim` numbers of each head turn; the rest pass through. A slot is block * block_size + offset; -1
writes nothing. A quantised cache holds each head's numbers as codes of one byte, which its scale turns back: code *
scale.
"""

from collections.abc import Callable
from ctypes import CDLL

import torch
from torch.nn import functional

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row of x [..., H] and scale by weight [H]; the result has x's type and shape."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x [T, H] to residual in place, and return (normalised residual, residual)."""
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


def cpu_rms_norm(library: CDLL) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """The compiled rms_norm; x may be [T, H] or heads [T, N, D] with any strides outside the last dimension."""
    native = library.kvasir_rms_norm

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not _is_compiled(x, weight) or x.dim() not in (2, 3):
            warn_of_twin("rms_norm", _words(x, weight))
            return rms_norm_reference(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        width = x.shape[-1]
        group, row_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
        native(
            DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype], x.data_ptr(), out.numel() // width, group, x.stride(0),
            row_stride, weight.data_ptr(), out.data_ptr(), width, eps,
        )  # fmt: skip
        return out

    return rms_norm


def cpu_add_rms_norm(
    library: CDLL,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]:
    """The compiled add_rms_norm."""
    native = library.kvasir_add_rms_norm

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _is_compiled(x, weight) or residual.dtype != x.dtype or residual.stride(1) != 1:
            warn_of_twin("add_rms_norm", _words(x, weight))
            return add_rms_norm_reference(x, residual, weight, eps)
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        native(
            DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype], x.data_ptr(), x.stride(0), residual.data_ptr(),
            residual.stride(0), weight.data_ptr(), out.data_ptr(), rows, width, eps,
        )  # fmt: skip
        return out, residual

    return add_rms_norm


def _is_compiled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype in DTYPE_CODES and weight.dtype in (torch.float32, x.dtype) and x.stride(-1) == 1


def _words(x: torch.Tensor, weight: torch.Tensor) -> str:
    """What cannot be read, for the log."""
    return f"x is {x.dtype} of {x.dim()} dimensions with strides {x.stride()}, the weight {weight.dtype}"


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] for gate_up [T, 2I], gate in the first half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up [T, I] with the tanh form of gelu, gate in the first half of gate_up [T, 2I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def cpu_silu_and_mul(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled silu_and_mul."""
    return _gated(library.kvasir_silu_and_mul, silu_and_mul_reference)


def cpu_gelu_tanh_and_mul(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled gelu_tanh_and_mul."""
    return _gated(library.kvasir_gelu_tanh_and_mul, gelu_tanh_and_mul_reference)


def _gated(
    native: Callable[..., None], reference: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype not in DTYPE_CODES or gate_up.dim() != 2 or gate_up.stride(1) != 1:
            warn_of_twin("the gated activation", f"its input is {gate_up.dtype} with strides {gate_up.stride()}")
            return reference(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        native(DTYPE_CODES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width)
        return out

    return gated


def rotate_and_write_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write key and value [T, Hk, D] to their slots and return the turned query [T, Hq, D].

    With weights [D] each head is normalised first, and the query is a new tensor; else it is changed in place, as the
    key always may be. Tables, positions, slots and scales are those of `rotary_reference` and `write_kv_reference`.
    """
    if query_weight is not None and key_weight is not None:
        query, key = rms_norm_reference(query, query_weight, eps), rms_norm_reference(key, key_weight, eps)
    rotary_reference(query, key, cos, sin, positions)
    write_kv_reference(key, value, key_cache, value_cache, slots, key_scale, value_scale)
    return query


def cpu_rotate_and_write(library: CDLL) -> Callable[..., torch.Tensor]:
    """The compiled kernel, with the reference's arguments. Query and key, often views into one packed projection, are
    changed in place; what it cannot read goes to the reference."""
    native = library.kvasir_rotate_and_write

    def rotate_and_write(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        weight = query if query_weight is None else query_weight
        if not _can_rotate(query, key, value, key_cache, weight):
            warn_of_twin("rotate_and_write", _words_of_heads(query, key_cache, weight))
            return rotate_and_write_reference(
                query, key, value, key_cache, value_cache, cos, sin, positions, slots, query_weight, key_weight, eps
            )
        num_tokens, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        native(
            DTYPE_CODES[query.dtype], DTYPE_CODES[weight.dtype],
            query.data_ptr(), query.stride(0), num_heads, key.data_ptr(), key.stride(0),
            value.data_ptr(), value.stride(0), num_kv_heads, head_dim,
            None if query_weight is None else query_weight.data_ptr(),
            None if key_weight is None else key_weight.data_ptr(), eps,
            cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), cos.shape[1] // 2,
            key_cache.data_ptr(), value_cache.data_ptr(), block_size, key_cache.stride(0), key_cache.stride(1),
            slots.data_ptr(), num_tokens,
        )  # fmt: skip
        return query

    return rotate_and_write


def _can_rotate(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, weight: torch.Tensor
) -> bool:
    """Called for each layer, so it asks only for what may differ between models."""
    dtype, head_dim = query.dtype, query.shape[2]
    has_types = dtype in DTYPE_CODES and key_cache.dtype == dtype and weight.dtype in (torch.float32, dtype)
    if not has_types or key_cache.stride(2) != head_dim:
        return False
    return query.stride(1) == head_dim and key.stride(1) == head_dim and value.stride(1) == head_dim


def _words_of_heads(query: torch.Tensor, key_cache: torch.Tensor, weight: torch.Tensor) -> str:
    """What cannot be read, for the log."""
    return (
        f"the query is {query.dtype} with strides {query.stride()}, the cache {key_cache.dtype} with strides "
        f"{key_cache.stride()}, the norm's weight {weight.dtype}"
    )


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


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Store key and value [T, Hk, D] at slots int64 [T] of the caches [num_blocks, block_size, Hk, D], any strides;
    of quantised ones with scales float32 [num_blocks, block_size, Hk]."""
    block_size = key_cache.shape[1]
    kept = slots >= 0
    blocks = slots[kept] // block_size
    offsets = slots[kept] % block_size
    for numbers, cache, scale in ((key[kept], key_cache, key_scale), (value[kept], value_cache, value_scale)):
        if scale is None:
            cache[blocks, offsets] = numbers.to(cache.dtype)
        else:
            cache[blocks, offsets], scale[blocks, offsets] = quantise(numbers, cache.dtype)


def quantise(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., D] of numbers [..., D], and scales float32 [...]: the largest of D becomes the type's largest."""
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    wide = numbers.float()
    scale = wide.abs().amax(-1) / largest
    codes = wide / torch.where(scale > 0, scale, 1.0)[..., None]
    codes = codes.clamp(-largest, largest)  # a scale too small to be exact
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale
