"""From the vectors that the engine makes to the numbers that clients get: cut, of length 1, or as probabilities."""

import base64

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.pooling.description import Activation

Vector = NDArray[np.float32]


def vector_of(pooled: bytes) -> Vector:
    return np.frombuffer(pooled, dtype="<f4")


def cut(vector: Vector, size: int | None) -> Vector:
    return vector if size is None else vector[:size]


def normalised(vector: Vector) -> Vector:
    """Of length 1, but for a vector of zeros."""
    length = np.sqrt(np.square(vector, dtype=np.float64).sum())
    return vector if length == 0.0 else (vector / length).astype(np.float32)


def activated(scores: Vector, activation: Activation) -> Vector:
    wide = scores.astype(np.float64)
    match activation:
        case "identity":
            return scores
        case "sigmoid":
            return (0.5 * (1.0 + np.tanh(0.5 * wide))).astype(np.float32)  # without overflow
        case "softmax":
            powers = np.exp(wide - wide.max())
            probabilities: Vector = (powers / powers.sum()).astype(np.float32)
            return probabilities


def as_base64(vector: Vector) -> str:
    """Of little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def as_json(vector: Vector) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))
