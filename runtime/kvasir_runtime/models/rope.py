"""Rotary position embedding tables, with the scalings that checkpoints declare.

RoPE: Su et al. 2021; linear: Chen et al. 2023; dynamic NTK and YaRN: Peng et al. 2023; llama3: the Llama 3.1 model
card; longrope: Ding et al. 2024. Tables are fixed for the life of the engine: scalings that change with a sequence's
length are served only up to the length at which they would change (`RopeOptions.max_exact_length`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.models.hf_config import HuggingFaceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOptions:
    rope_type: str
    base: float
    rotary_dim: int
    """Numbers of each head that turn; even."""
    max_position_embeddings: int
    original_max_position_embeddings: int
    """Context of the pre-training, before any scaling."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's rope object, for what only one scaling reads."""

    @property
    def max_exact_length(self) -> int | None:
        """Longest sequence whose frequencies do not depend on its length; None: any."""
        if self.rope_type == "dynamic":
            return self.max_position_embeddings
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None


def read_rope(
    config: HuggingFaceConfig, head_dim: int, *, layer_type: str | None = None, default_base: float = 10_000.0
) -> RopeOptions:
    """Rope of one kind of layer, from `rope_parameters` (flat, or by layer type) or the older `rope_scaling`.

    Raises ModelLoadError for a scaling that is not known here.
    """
    parameters = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in _FREQUENCIES:
        raise ModelLoadError(
            f"{config.path}: rope type {rope_type!r} is not supported; known types: {', '.join(sorted(_FREQUENCIES))}"
        )
    share = float(parameters.get("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)))
    max_position_embeddings = config.integer("max_position_embeddings")
    original = config.optional_integer(
        "original_max_position_embeddings", parameters.get("original_max_position_embeddings")
    )
    return RopeOptions(
        rope_type=rope_type,
        base=float(parameters.get("rope_theta", config.number("rope_theta", default_base))),
        rotary_dim=int(head_dim * share),
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original or max_position_embeddings,
        parameters=parameters,
    )


def rope_tables(options: RopeOptions, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [num_positions, rotary_dim], both halves of a row equal. Raises ModelLoadError."""
    try:
        frequencies, factor = _FREQUENCIES[options.rope_type](options)
    except KeyError as error:
        message = f"rope type {options.rope_type!r} needs {error} in the checkpoint's rope parameters"
        raise ModelLoadError(message) from error
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _default(options: RopeOptions) -> tuple[Tensor, float]:
    exponents = torch.arange(0, options.rotary_dim, 2, dtype=torch.int64).float() / options.rotary_dim
    return 1.0 / options.base**exponents, 1.0


def _linear(options: RopeOptions) -> tuple[Tensor, float]:
    return _default(options)[0] / options.parameters["factor"], 1.0


def _llama3(options: RopeOptions) -> tuple[Tensor, float]:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    parameters = options.parameters
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _default(options)[0]
    turns = options.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept_share) * frequencies / factor + kept_share * frequencies, 1.0


def _yarn(options: RopeOptions) -> tuple[Tensor, float]:
    """Like llama3, but the ramp runs over dimensions, and attention is sharpened through the tables' size."""
    parameters = options.parameters
    factor = parameters.get("factor") or options.max_position_embeddings / options.original_max_position_embeddings
    first, last = (
        _dimension_of_turns(options, parameters.get(name) or default)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, options.rotary_dim - 1)
    width = (last - first) or 0.001
    dimensions = torch.arange(options.rotary_dim // 2, dtype=torch.float32)
    stretched_share = ((dimensions - first) / width).clamp(0.0, 1.0)
    frequencies = _default(options)[0]
    scaled = frequencies / factor * stretched_share + frequencies * (1.0 - stretched_share)
    return scaled, _yarn_attention_factor(parameters, factor)


def _dimension_of_turns(options: RopeOptions, num_turns: float) -> float:
    """Which dimension makes `num_turns` turns over the original context."""
    waves = options.original_max_position_embeddings / (num_turns * 2 * math.pi)
    return options.rotary_dim * math.log(waves) / (2 * math.log(options.base))


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)


def _longrope(options: RopeOptions) -> tuple[Tensor, float]:
    """The short factors: up to the original context, which is as far as longrope is served."""
    parameters = options.parameters
    original = options.original_max_position_embeddings
    short = torch.tensor(parameters["short_factor"], dtype=torch.float32)
    factor = parameters.get("factor") or options.max_position_embeddings / original
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _default(options)[0] / short, float(magnitude)


_FREQUENCIES: Mapping[str, Callable[[RopeOptions], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _default,  # it differs only beyond max_exact_length
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
