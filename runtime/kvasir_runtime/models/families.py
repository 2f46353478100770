"""The known architectures, by the name that config.json gives them.

A new family of decoders is a function from config.json to `DecoderOptions`, named in `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvasir_runtime.errors import UnknownArchitectureError
from kvasir_runtime.models.dense_families import gemma2, gemma3, llama, mistral, olmo2, phi3, qwen2, qwen3
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.moe_families import mixtral, qwen2_moe, qwen3_moe
from kvasir_runtime.models.options import DecoderOptions

FAMILIES: Mapping[str, Callable[[HuggingFaceConfig], DecoderOptions]] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


_NOT_GENERATING = ("ForSequenceClassification", "TextModel", "Model")
"""Ends of the names of architectures that have a family's layers, and another head or none."""


def generating_architecture(name: str) -> str:
    """The family's own, of an embedding model or a classifier with its layers; the name itself where none is known."""
    end = next((end for end in _NOT_GENERATING if name.endswith(end)), "")
    own = name.removesuffix(end) + "ForCausalLM"
    return own if own in FAMILIES else name


def read_options(config: HuggingFaceConfig, architecture: str | None = None) -> DecoderOptions:
    """Options of the architecture that config.json names, or of `architecture` where a draft's config.json names one
    of its own. Raises UnknownArchitectureError, ModelLoadError."""
    architectures = [architecture] if architecture else config.texts("architectures")
    name = next((name for name in architectures if name in FAMILIES), None)
    if name is None:
        seen = ", ".join(architectures) or f"none (model_type {config.text('model_type', 'missing')!r})"
        raise UnknownArchitectureError(
            f"{config.path}: architecture {seen} is not known; known architectures: {', '.join(sorted(FAMILIES))}"
        )
    return replace(FAMILIES[name](config), architecture=name)
