"""The public layouts of EAGLE heads: EAGLE-1/2 (`fc`, `layers.0`), and EAGLE-3 (`fc`, `midlayer`, `lm_head`, `d2t`).

Sizes are config.json's; whether there are biases, and an embedding of the head's own, its tensors say: config.json of
published heads often does not. Speculators writes EAGLE-3 with `layers.0`, and config.json with an object of its own
for the layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, LayerCache
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint import SAFETENSORS, Checkpoint
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.decoder import Attention, Decoder, DecoderLayer, Embedding, Norm, residual_stream
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig, read_config
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.module_loader import ModuleLoader, make_module_loader
from kvasir_runtime.models.options import DecoderOptions, LayerOptions
from kvasir_runtime.models.placement import Placement

EAGLE_FILES: Final = (SAFETENSORS, "pytorch_model.bin")
"""Its authors publish the latter."""
_LEFTOVERS: Final = ("rotary_emb.inv_freq",)
_OTHER_NORMS: Final = ("norm_before_fc", "fc_norm", "norm_output")
"""What config.json calls norms of later EAGLE-3 heads, which are not computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Head:
    """A decoder layer over the fused embedding and hidden state; the target's lm head reads its output."""

    fusion: Linear  # [embedding, hidden state] -> hidden state
    embedding: Embedding
    layer: DecoderLayer
    to_logits: Callable[[Tensor], Tensor]
    kv_specs: tuple[KvSpec, ...]
    captured_layers: tuple[int, ...] = ()

    def target_states(self, hidden: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        return hidden

    def forward(
        self, states: Tensor, token_ids: Tensor, attention: AttentionStep, caches: Sequence[LayerCache]
    ) -> Tensor:
        fused = self.fusion(torch.cat((self.embedding(token_ids), states), -1))
        return residual_stream(*self.layer(fused, None, attention, caches))

    def most_likely(self, states: Tensor) -> Tensor:
        return self.to_logits(states).argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Head:
    """Three of the target's layers are fused once; attention sees embedding and state side by side, each normalised.
    Its hidden size may be another than the target's."""

    fusion: Linear  # [captured, ...] -> hidden state
    embedding: Embedding
    embedding_norm: Norm
    hidden_norm: Norm
    norm_before_residual: bool
    """Whether the residual stream begins with the normalised state."""
    attention: Attention
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    norm: Norm
    lm_head: Linear
    draft_to_target: Tensor | None  # int64 [draft_vocab_size], the target's id of each draft token; None: the same
    kv_specs: tuple[KvSpec, ...]
    captured_layers: tuple[int, ...]

    def target_states(self, hidden: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        return self.fusion(torch.cat(captured, -1))

    def forward(
        self, states: Tensor, token_ids: Tensor, attention: AttentionStep, caches: Sequence[LayerCache]
    ) -> Tensor:
        normed = self.hidden_norm(states)
        entered = torch.cat((self.embedding_norm(self.embedding(token_ids)), normed), -1)
        attended = self.attention.output(self.attention(entered, attention, caches))
        normed, residual = self.mlp_norm.add(attended, normed if self.norm_before_residual else states)
        return residual_stream(self.mlp(normed), residual)

    def most_likely(self, states: Tensor) -> Tensor:
        token_ids = self.lm_head(self.norm(states)).argmax(-1)
        return token_ids if self.draft_to_target is None else self.draft_to_target[token_ids]


def load_eagle1(folder: Path, target: Decoder, placement: Placement, max_model_len: int) -> Eagle1Head:
    """Raises ConfigurationError, ModelLoadError."""
    config = read_config(folder)
    options = _head_options(config, target)
    if options.hidden_size != target.options.hidden_size:
        raise ConfigurationError(
            f"{folder} holds an EAGLE head for hidden states of size {options.hidden_size}, the target's have size "
            f"{target.options.hidden_size}: use a head that was trained on this model"
        )
    size, prefix = options.hidden_size, "layers.0"
    with Checkpoint(folder, EAGLE_FILES) as checkpoint:
        modules = make_module_loader(checkpoint, options, placement, max_model_len)
        layer = _layer_options(options, checkpoint, prefix)
        if f"{prefix}.input_layernorm.weight" not in checkpoint:
            layer = replace(layer, norms=layer.norms - {"before_attention"})
        head = Eagle1Head(
            fusion=modules.linear(["fc"], [size], 2 * size, has_bias="fc.bias" in checkpoint),
            embedding=_embedding(modules, target, size),
            layer=LayerLoader(modules, LayerNames(), size).layer(prefix, layer),
            to_logits=target.logits,
            kv_specs=layer.attention.kv_specs(placement.dtype),
        )
        checkpoint.check_all_taken(ignored=("lm_head.weight", *_LEFTOVERS))  # a copy of the target's
    return head


def load_eagle3(folder: Path, target: Decoder, placement: Placement, max_model_len: int) -> Eagle3Head:
    """Raises ConfigurationError, ModelLoadError."""
    config = _with_layer_config(read_config(folder))
    _check_norms(config)
    options, target_size = _head_options(config, target), _target_size(config, target)
    captured = _captured_layers(config, target.options.num_layers)
    size, draft_vocab_size = options.hidden_size, config.integer("draft_vocab_size", options.vocab_size)
    with Checkpoint(folder, EAGLE_FILES) as checkpoint:
        modules = make_module_loader(checkpoint, options, placement, max_model_len)
        layers = LayerLoader(modules, LayerNames(), size)
        prefix = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"
        layer = _layer_options(options, checkpoint, prefix)
        head = Eagle3Head(
            fusion=modules.linear(["fc"], [size], len(captured) * target_size, has_bias="fc.bias" in checkpoint),
            embedding=_embedding(modules, target, size),
            embedding_norm=modules.norm(f"{prefix}.input_layernorm", size),
            hidden_norm=modules.norm(f"{prefix}.hidden_norm", size),
            norm_before_residual=config.flag("norm_before_residual", False),
            attention=layers.attention(prefix, layer.attention, in_features=2 * size),
            mlp_norm=modules.norm(f"{prefix}.post_attention_layernorm", size),
            mlp=layers.mlp(prefix, layer.mlp),
            norm=modules.norm("norm", size),
            lm_head=modules.linear(["lm_head"], [draft_vocab_size], size),
            draft_to_target=_draft_to_target(checkpoint, draft_vocab_size, options.vocab_size, placement.device),
            kv_specs=layer.attention.kv_specs(placement.dtype),
            captured_layers=captured,
        )
        checkpoint.check_all_taken(ignored=("t2d", *_LEFTOVERS))  # d2t read backwards
    return head


def _with_layer_config(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Its keys and those of Speculators' object side by side."""
    return replace(config, values={**config.values, **config.object("transformer_layer_config").values})


def _check_norms(config: HuggingFaceConfig) -> None:
    """Raises ConfigurationError."""
    for name in _OTHER_NORMS:
        if config.flag(name, False) or config.object("eagle_config").flag(name, False):
            raise ConfigurationError(
                f"{config.path}: the head was trained with {name}, which is not supported: use a head without it"
            )


def _target_size(config: HuggingFaceConfig, target: Decoder) -> int:
    """Raises ConfigurationError."""
    size = target.options.hidden_size
    expected = config.integer("target_hidden_size", size)
    if expected != size:
        raise ConfigurationError(
            f"{config.path}: the head is for hidden states of size {expected}, the target's have size {size}: "
            "use a head that was trained on this model"
        )
    return size


def _head_options(config: HuggingFaceConfig, target: Decoder) -> DecoderOptions:
    """Those of a Llama of one layer, whatever the head calls itself."""
    options = replace(read_options(config, "LlamaForCausalLM"), quantization=None)
    if options.vocab_size != target.options.vocab_size:
        raise ConfigurationError(
            f"{config.path}: vocab_size is {options.vocab_size}, the target's is {target.options.vocab_size}: "
            "use a head that was trained on this model"
        )
    return options


def _layer_options(options: DecoderOptions, checkpoint: Checkpoint, prefix: str) -> LayerOptions:
    """The head's one layer, with biases where the checkpoint has them."""
    layer = options.layers[0]
    biases = {name: f"{prefix}.self_attn.{name}_proj.bias" in checkpoint for name in "qkvo"}
    attention = replace(layer.attention, qkv_bias=biases["q"] or biases["k"] or biases["v"], output_bias=biases["o"])
    return replace(layer, attention=attention)


def _captured_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Where config.json names none, the low, middle and high ones of the paper. Raises ConfigurationError."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = config.integers(key) or config.object("eagle_config").integers(key)
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    if not all(0 <= layer < num_layers for layer in layers):
        raise ConfigurationError(
            f"{config.path}: the head reads the target before its layers {list(layers)}, but the target has "
            f"{num_layers}: use a head that was trained on this model"
        )
    return layers


def _embedding(modules: ModuleLoader, target: Decoder, size: int) -> Embedding:
    """The head's own where its checkpoint has one. Raises ConfigurationError where the target's is of another size."""
    assert target.embedding is not None, "the rank that drafts loads the target's embedding"
    if "embed_tokens.weight" in modules.checkpoint:
        return Embedding(modules.table("embed_tokens", (target.options.vocab_size, size)), target.embedding.scale)
    if size != target.options.hidden_size:
        raise ConfigurationError(
            f"{modules.checkpoint.folder} has no tensor embed_tokens.weight, and its hidden size {size} is not the "
            f"target's {target.options.hidden_size}, whose embedding it would read: use a complete checkpoint"
        )
    return target.embedding


def _draft_to_target(checkpoint: Checkpoint, draft_size: int, target_size: int, device: torch.device) -> Tensor | None:
    """The checkpoint's `d2t` holds how far each id moves. Raises CheckpointError, ConfigurationError."""
    if "d2t" not in checkpoint:
        if draft_size != target_size:
            raise ConfigurationError(
                f"{checkpoint.folder}: draft_vocab_size {draft_size} is not the target's {target_size}, and there is "
                "no tensor d2t that says which token is which: use a complete checkpoint"
            )
        return None
    token_ids = torch.arange(draft_size) + checkpoint.take("d2t", (draft_size,)).long()
    if not bool(((token_ids >= 0) & (token_ids < target_size)).all()):
        raise ConfigurationError(
            f"{checkpoint.folder}: d2t names tokens outside the target's vocabulary of {target_size}: "
            "use a head that was trained on this model"
        )
    return token_ids.to(device)
