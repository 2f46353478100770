"""The public layouts of EAGLE heads: EAGLE-1/2 (`fc`, `layers.0`), and EAGLE-3 (`fc`, `midlayer`, `lm_head`, `d2t`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, LayerCache
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig, read_config
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.layers import Attention, DecoderLayer, Norm, residual_stream
from kvasir_runtime.models.module_loader import ModuleLoader, make_module_loader
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.vocabulary import Embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Head:
    """A decoder layer over the fused embedding and hidden state; the target's lm head reads its output."""

    fusion: Linear  # [embedding, hidden state] -> hidden state
    embedding: Embedding
    layer: DecoderLayer
    to_logits: Callable[[Tensor], Tensor]
    kv_spec: KvSpec
    captured_layers: tuple[int, ...] = ()

    def target_states(self, hidden: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        return hidden

    def forward(self, states: Tensor, token_ids: Tensor, attention: AttentionStep, cache: LayerCache) -> Tensor:
        fused = self.fusion(torch.cat((self.embedding(token_ids), states), -1))
        return residual_stream(*self.layer(fused, None, attention, cache))

    def most_likely(self, states: Tensor) -> Tensor:
        return self.to_logits(states).argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Head:
    """Three of the target's layers are fused once; attention sees embedding and state side by side, each normalised."""

    fusion: Linear  # [captured, ...] -> hidden state
    embedding: Embedding
    embedding_norm: Norm
    hidden_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    norm: Norm
    lm_head: Linear
    draft_to_target: Tensor | None  # int64 [draft_vocab_size], the target's id of each draft token; None: the same
    kv_spec: KvSpec
    captured_layers: tuple[int, ...]

    def target_states(self, hidden: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        return self.fusion(torch.cat(captured, -1))

    def forward(self, states: Tensor, token_ids: Tensor, attention: AttentionStep, cache: LayerCache) -> Tensor:
        entered = torch.cat((self.embedding_norm(self.embedding(token_ids)), self.hidden_norm(states)), -1)
        attended = self.attention.output(self.attention(entered, attention, cache))
        normed, residual = self.mlp_norm.add(attended, states)
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
    with Checkpoint(folder) as checkpoint:
        modules = make_module_loader(checkpoint, options, placement, max_model_len)
        layer = options.layers[0]
        if f"{prefix}.input_layernorm.weight" not in checkpoint:
            layer = replace(layer, norms=layer.norms - {"before_attention"})
        head = Eagle1Head(
            fusion=modules.linear(["fc"], [size], 2 * size, has_bias="fc.bias" in checkpoint),
            embedding=_embedding(modules, target),
            layer=LayerLoader(modules, LayerNames(), size).layer(prefix, layer),
            to_logits=target.logits,
            kv_spec=layer.attention.kv_spec(placement.dtype),
        )
        checkpoint.check_all_taken(ignored=("lm_head.weight",))  # a copy of the target's
    return head


def load_eagle3(folder: Path, target: Decoder, placement: Placement, max_model_len: int) -> Eagle3Head:
    """Raises ConfigurationError, ModelLoadError."""
    config = read_config(folder)
    options = _head_options(config, target)
    captured = _captured_layers(config, target.options.num_layers)
    size, target_size, prefix = options.hidden_size, target.options.hidden_size, "midlayer"
    draft_vocab_size = config.integer("draft_vocab_size", options.vocab_size)
    attention = options.layers[0].attention
    with Checkpoint(folder) as checkpoint:
        modules = make_module_loader(checkpoint, options, placement, max_model_len)
        layers = LayerLoader(modules, LayerNames(), size)
        head = Eagle3Head(
            fusion=modules.linear(["fc"], [size], len(captured) * target_size, has_bias="fc.bias" in checkpoint),
            embedding=_embedding(modules, target),
            embedding_norm=modules.norm(f"{prefix}.input_layernorm", target_size),
            hidden_norm=modules.norm(f"{prefix}.hidden_norm", size),
            attention=layers.attention(prefix, attention, in_features=target_size + size),
            mlp_norm=modules.norm(f"{prefix}.post_attention_layernorm", size),
            mlp=layers.mlp(prefix, options.layers[0].mlp),
            norm=modules.norm("norm", size),
            lm_head=modules.linear(["lm_head"], [draft_vocab_size], size),
            draft_to_target=_draft_to_target(checkpoint, draft_vocab_size, options.vocab_size, placement.device),
            kv_spec=attention.kv_spec(placement.dtype),
            captured_layers=captured,
        )
        checkpoint.check_all_taken(ignored=("t2d",))  # d2t read backwards
    return head


def _head_options(config: HuggingFaceConfig, target: Decoder) -> DecoderOptions:
    """Those of a Llama of one layer, whatever the head calls itself."""
    options = replace(read_options(config, "LlamaForCausalLM"), quantization=None)
    if options.vocab_size != target.options.vocab_size:
        raise ConfigurationError(
            f"{config.path}: vocab_size is {options.vocab_size}, the target's is {target.options.vocab_size}: "
            "use a head that was trained on this model"
        )
    return options


def _captured_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Where config.json names none, the low, middle and high ones of the paper. Raises ConfigurationError."""
    named = config.mapping("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers):
        raise ConfigurationError(
            f"{config.path}: the head reads the target before its layers {list(layers)}, but the target has "
            f"{num_layers}: use a head that was trained on this model"
        )
    return layers


def _embedding(modules: ModuleLoader, target: Decoder) -> Embedding:
    """The head's own where its checkpoint has one."""
    assert target.embedding is not None, "the rank that drafts loads the target's embedding"
    if "embed_tokens.weight" not in modules.checkpoint:
        return target.embedding
    shape = (target.options.vocab_size, target.options.hidden_size)
    return Embedding(modules.table("embed_tokens", shape), target.embedding.scale)


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
