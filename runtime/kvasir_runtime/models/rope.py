"""Rotary position embeddings: how fast each pair of numbers turns, with the scalings that checkpoints declare.

RoPE: Su et al. 2021; linear: Chen et al. 2023; dynamic NTK and YaRN: Peng et al. 2023; llama3: the Llama 3.1 model
card; longrope: Ding et al. 2024. Frequencies are fixed for the life of the engine: scalings that change with a
sequence's length are served only up to the length at which they would change (`RopeOptions.max_exact_length`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.checkpoint_json import ADVICE, shortened
from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.models.hf_config import HuggingFaceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOptions:
    frequencies: tuple[float, ...]
    """Radians a position, in float32: of each pair of numbers that turns."""
    magnitude: float
    """Of cosines and sines: attention is sharpened through it."""
    max_exact_length: int | None
    """Longest sequence whose frequencies do not depend on its length; None: any."""
    max_length: int
    """Longest sequence that the scaling is meant for."""


def read_rope(
    config: HuggingFaceConfig,
    head_dim: int,
    *,
    layer_type: str | None = None,
    default_base: float = 10_000.0,
    synonyms: Mapping[str, str] | None = None,
) -> RopeOptions:
    """Rope of one kind of layer, from `rope_parameters` (flat, or by layer type) or the older `rope_scaling`.

    Raises ModelLoadError, also for a scaling that is not known here. `synonyms`: what else its types are called.
    """
    given = config.object("rope_scaling")
    given = given if given.values else config.object("rope_parameters")
    if layer_type is not None and layer_type in given.values:
        given = given.object(layer_type)
    rope_type = given.text("rope_type", given.text("type", "default"))
    rope_type = (synonyms or {}).get(rope_type, rope_type)
    if rope_type not in _SCALINGS:
        raise ModelLoadError(
            f"{config.path}: rope type {rope_type!r} is not supported; known types: {', '.join(sorted(_SCALINGS))}"
        )
    share = given.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{config.path}: {rotary_dim} of the {head_dim} numbers of a head turn (head_dim, partial_rotary_factor), "
            "expected an even part of them"
        )
    positions = config.integer("max_position_embeddings")
    original = given.integer("original_max_position_embeddings", positions)
    rope = _Declared(
        given=given,
        base=given.number("rope_theta", config.number("rope_theta", default_base)),
        rotary_dim=rotary_dim,
        positions=positions,
        original=config.integer("original_max_position_embeddings", original),
    )
    try:
        frequencies, magnitude = _SCALINGS[rope_type](rope)
    except ArithmeticError as error:
        raise rope.error(str(error)) from error
    if not (frequencies.isfinite().all() and math.isfinite(magnitude)):
        raise rope.error("some are not finite")
    return RopeOptions(
        frequencies=tuple(frequencies.tolist()),
        magnitude=magnitude,
        max_exact_length={"dynamic": positions, "longrope": rope.original}.get(rope_type),
        max_length=max(positions, _scaled_positions(rope, rope_type)),
    )


def rope_tables(rope: RopeOptions, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [num_positions, rotary_dim], both halves of a row equal."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(rope.frequencies)).repeat(1, 2)
    return (angles.cos() * rope.magnitude).to(device), (angles.sin() * rope.magnitude).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """What config.json says of a rope."""

    given: HuggingFaceConfig
    """Its rope object, for what only one scaling reads."""
    base: float
    rotary_dim: int
    """Numbers of each head that turn."""
    positions: int
    original: int
    """Context of the pre-training, before any scaling."""

    def error(self, why: str) -> ModelLoadError:
        seen = shortened(dict(self.given.values))
        return ModelLoadError(
            f"{self.given.path}: rope_theta {self.base:g} and {self.given.section or 'rope_scaling.'}{seen} make no "
            f"frequencies that can be used: {why}; {ADVICE}"
        )


def _scaled_positions(rope: _Declared, rope_type: str) -> int:
    """Of models whose max_position_embeddings does not count their scaling, as Qwen's cards say to declare YaRN."""
    unscaled = {"linear": rope.positions, "yarn": rope.original}.get(rope_type, 0)
    return int(unscaled * rope.given.number("factor", 1.0))


def _default(rope: _Declared) -> tuple[Tensor, float]:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / rope.base**exponents, 1.0


def _linear(rope: _Declared) -> tuple[Tensor, float]:
    return _default(rope)[0] / rope.given.number("factor"), 1.0


def _llama3(rope: _Declared) -> tuple[Tensor, float]:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (rope.given.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _default(rope)[0]
    turns = rope.original * frequencies / (2 * math.pi)
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept_share) * frequencies / factor + kept_share * frequencies, 1.0


def _yarn(rope: _Declared) -> tuple[Tensor, float]:
    """Like llama3, but the ramp runs over dimensions, and attention is sharpened through the tables' size."""
    factor = rope.given.number("factor", rope.positions / rope.original)
    first = _dimension_of_turns(rope, rope.given.number("beta_fast", 32.0))
    last = _dimension_of_turns(rope, rope.given.number("beta_slow", 1.0))
    if rope.given.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = (last - first) or 0.001
    dimensions = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    stretched_share = ((dimensions - first) / width).clamp(0.0, 1.0)
    frequencies = _default(rope)[0]
    scaled = frequencies / factor * stretched_share + frequencies * (1.0 - stretched_share)
    return scaled, _yarn_magnitude(rope.given, factor)


def _dimension_of_turns(rope: _Declared, num_turns: float) -> float:
    """Which dimension makes `num_turns` turns over the original context."""
    waves = rope.original / (num_turns * 2 * math.pi)
    return rope.rotary_dim * math.log(waves) / (2 * math.log(rope.base))


def _yarn_magnitude(given: HuggingFaceConfig, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (declared := given.optional_number("attention_factor", None)) is not None:
        return declared
    weight, weight_all = (given.optional_number(name, None) for name in ("mscale", "mscale_all_dim"))
    return magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)


def _longrope(rope: _Declared) -> tuple[Tensor, float]:
    """The short factors: up to the original context, which is as far as longrope is served."""
    short = rope.given.numbers("short_factor")
    if len(short) != rope.rotary_dim // 2:
        raise rope.given.error("short_factor", f"a list of {rope.rotary_dim // 2} numbers above 0")
    factor = rope.given.number("factor", rope.positions / rope.original)
    magnitude = rope.given.optional_number("attention_factor", None)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(rope.original)) if factor > 1 else 1.0
    return _default(rope)[0] / torch.tensor(short), magnitude


_SCALINGS: Mapping[str, Callable[[_Declared], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _default,  # it differs only beyond max_exact_length
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
