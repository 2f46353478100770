"""Builds a decoder from a checkpoint, module by module."""

import torch

from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import CheckpointNames, names_of
from kvasir_runtime.models.decoder import Decoder, Embedding
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.module_loader import ModuleLoader, make_module_loader
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement

_LEFTOVERS = ("rotary_emb.inv_freq",)
"""Buffers that older checkpoints saved along with the weights."""


def load_decoder(checkpoint: Checkpoint, options: DecoderOptions, placement: Placement, max_model_len: int) -> Decoder:
    """The decoder with its weights on the device; `max_model_len` sizes its rope tables. Raises ModelLoadError."""
    names = names_of(options.architecture)
    modules = make_module_loader(checkpoint, options, placement, max_model_len)
    layers = LayerLoader(modules, names.layer, options.hidden_size)
    embedding, head = _embedding_and_head(modules, names, options)
    decoder = Decoder(
        options=options,
        embedding=embedding,
        layers=tuple(layers.layer(f"{names.layers}.{i}", layer) for i, layer in enumerate(options.layers)),
        norm=modules.norm(names.norm, options.hidden_size),
        head=head,
    )
    tied_head = (f"{names.head}.weight",) if options.tie_word_embeddings else ()
    checkpoint.check_all_taken(ignored=(*_LEFTOVERS, *tied_head))
    return decoder


def _embedding_and_head(
    modules: ModuleLoader, names: CheckpointNames, options: DecoderOptions
) -> tuple[Embedding, Linear]:
    """Where the two are tied, the head's weight is the embedding's table."""
    vocab_size, hidden_size = options.vocab_size, options.hidden_size
    scale = options.embedding_scale
    if scale is not None:  # rounded to the model's type, as the architectures that scale were trained
        scale = torch.tensor(scale, dtype=modules.placement.dtype).item()
    if options.tie_word_embeddings:
        head = modules.linear([names.embedding], [vocab_size], hidden_size)
        return Embedding(head, scale), head
    table = modules.table(names.embedding, (vocab_size, hidden_size))
    return Embedding(table, scale), modules.linear([names.head], [vocab_size], hidden_size)
