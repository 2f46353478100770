"""Builds a rank's part of a decoder from a checkpoint, module by module."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import CheckpointNames, names_in
from kvasir_runtime.models.decoder import Decoder, Embedding, VocabularyParallelHead, VocabularyPart
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.module_loader import ModuleLoader, make_module_loader
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.parallel.stage import WHOLE, Stage

_LEFTOVERS = ("rotary_emb.inv_freq",)
"""Buffers that older checkpoints saved along with the weights."""


def load_decoder(
    checkpoint: Checkpoint,
    options: DecoderOptions,
    placement: Placement,
    max_model_len: int,
    stage: Stage = WHOLE,
    *,
    drafts_embed: bool = False,
    has_head: bool = True,
    over_layers: Callable[[range], Iterable[int]] = iter,
) -> Decoder:
    """This rank's part, with its weights on the device; `max_model_len` sizes its rope tables.

    `drafts_embed`: whether the last stage needs the embedding too, for heads that read it; `has_head`: whether it needs
    logits. `over_layers` gives the rank's layers back one by one, as they are loaded. Raises ModelLoadError, or
    ConfigurationError when the model does not divide among the ranks.
    """
    names, own = names_in(checkpoint, options.architecture), stage.layers(options.num_layers)
    modules = make_module_loader(checkpoint, options, placement, max_model_len)
    layers = LayerLoader(modules, names.layer, options.hidden_size)
    is_tied = has_head and options.tie_word_embeddings
    has_embedding = stage.is_first or (stage.is_last and (drafts_embed or is_tied))
    linear = _head_linear(modules, names, options) if stage.is_last and has_head else None
    decoder = Decoder(
        options=options,
        embedding=_embedding(modules, names, options, linear) if has_embedding else None,
        first_layer=own.start,
        layers=tuple(layers.layer(f"{names.layers}.{i}", options.layers[i]) for i in over_layers(own)),
        norm=modules.norm(names.norm, options.hidden_size) if stage.is_last else None,
        head=None if linear is None else _head(linear, modules, options),
    )
    tied_head = (f"{names.head}.weight",) if options.tie_word_embeddings else ()
    checkpoint.check_all_taken(ignored=(*_LEFTOVERS, *tied_head), elsewhere=_elsewhere(decoder, names))
    return decoder


def _elsewhere(decoder: Decoder, names: CheckpointNames) -> list[str]:
    """Modules of the model that are other stages'."""
    own = range(decoder.first_layer, decoder.first_layer + len(decoder.layers))
    modules = [f"{names.layers}.{i}" for i in range(decoder.options.num_layers) if i not in own]
    modules += [names.embedding] if decoder.embedding is None else []
    return modules + ([names.norm, names.head] if decoder.head is None else [])


def _head_linear(modules: ModuleLoader, names: CheckpointNames, options: DecoderOptions) -> Linear:
    """This rank's part of the head; where it is tied to the embedding, its weight is the embedding's table."""
    name = names.embedding if options.tie_word_embeddings else names.head
    part = _part(modules, options)
    shard = None if part is None else part.shard
    return modules.linear([name], [options.vocab_size], options.hidden_size, shard=shard)


def _head(linear: Linear, modules: ModuleLoader, options: DecoderOptions) -> Callable[[Tensor], Tensor]:
    part = _part(modules, options)
    return linear if part is None else VocabularyParallelHead(linear, part)


def _embedding(
    modules: ModuleLoader, names: CheckpointNames, options: DecoderOptions, head: Linear | None
) -> Embedding:
    """Rows of the head's weight where the two are tied and on the same stage."""
    part, scale = _part(modules, options), options.embedding_scale
    if scale is not None:  # rounded to the model's type, as the architectures that scale were trained
        scale = torch.tensor(scale, dtype=modules.placement.dtype).item()
    if options.tie_word_embeddings and head is not None:
        return Embedding(head, scale, part)
    shape = (options.vocab_size, options.hidden_size)
    return Embedding(modules.table(names.embedding, shape, None if part is None else part.shard), scale, part)


def _part(modules: ModuleLoader, options: DecoderOptions) -> VocabularyPart | None:
    """This rank's tokens; None: all of them."""
    tensor = modules.placement.tensor
    return None if tensor.size == 1 else VocabularyPart(tensor, options.vocab_size)
