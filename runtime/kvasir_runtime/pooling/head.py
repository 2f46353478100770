"""From a prompt's pooled hidden state to its vector: the layers behind the pooling, in float32, a prompt at a time, so
that a vector does not depend on how many others a step makes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import CheckpointNames
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.weight_format import take_floats
from kvasir_runtime.pooling.description import Embedding, PoolingDescription
from kvasir_runtime.pooling.sentence_transformers import DenseLayer

Head = Callable[[Tensor], Tensor]
"""Of float32 [n, hidden_size] vectors float32 [n, size]."""
CLASSIFIER_HEAD = "score"
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "GELU": functional.gelu,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Layer:
    weight: Tensor  # float32 [out_features, in_features]
    bias: Tensor | None  # float32 [out_features]
    activation: Callable[[Tensor], Tensor] = _ACTIVATIONS["Identity"]

    def __call__(self, pooled: Tensor) -> Tensor:
        return self.activation(torch.stack([functional.linear(row, self.weight, self.bias) for row in pooled]))


@dataclass(frozen=True, slots=True)
class Chain:
    layers: Sequence[Head]

    def __call__(self, pooled: Tensor) -> Tensor:
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


def load_linear(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    device: torch.device,
    *,
    has_bias: bool,
    activation: str = "Identity",
) -> Layer:
    """Raises CheckpointError."""
    weight = take_floats(checkpoint, f"{name}.weight", shape).to(device, torch.float32, copy=True)
    bias = None
    if has_bias:
        bias = take_floats(checkpoint, f"{name}.bias", shape[:1]).to(device, torch.float32, copy=True)
    return Layer(weight, bias, _ACTIVATIONS[activation])


def load_dense(layer: DenseLayer, device: torch.device) -> Layer:
    """Raises CheckpointError."""
    shape = (layer.out_features, layer.in_features)
    with Checkpoint(layer.folder) as checkpoint:
        return load_linear(checkpoint, "linear", shape, device, has_bias=layer.bias, activation=layer.activation)


def load_decoder_head(
    pooling: PoolingDescription,
    checkpoint: Checkpoint,
    options: DecoderOptions,
    names: CheckpointNames,
    device: torch.device,
) -> Head:
    """Behind a decoder's last norm. Raises CheckpointError."""
    task = pooling.task
    if isinstance(task, Embedding):
        return Chain([load_dense(layer, device) for layer in task.dense])
    if task.token_ids is not None:
        no, yes = (_output_row(checkpoint, options, names, token_id) for token_id in task.token_ids)
        return Layer((yes - no).to(device), None)
    bias = f"{CLASSIFIER_HEAD}.bias"
    return load_linear(
        checkpoint, CLASSIFIER_HEAD, (len(task.labels), options.hidden_size), device, has_bias=bias in checkpoint
    )


def _output_row(checkpoint: Checkpoint, options: DecoderOptions, names: CheckpointNames, token_id: int) -> Tensor:
    """What a hidden state is multiplied with for a token's logit: float32 [1, hidden_size]."""
    name = names.embedding if options.tie_word_embeddings else names.head
    shape = (options.vocab_size, options.hidden_size)
    return checkpoint.take(f"{name}.weight", shape, rows=range(token_id, token_id + 1)).float()
