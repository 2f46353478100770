"""Which vector a checkpoint makes of a prompt, where it does not continue it: its files say so, or flags.

API processes, the engine core and ranks read it alike, so there is no torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from kvasir_runtime.checkpoint_json import ADVICE, read_json_object_if_there, shortened
from kvasir_runtime.config import ModelConfig
from kvasir_runtime.errors import ConfigurationError, ModelLoadError
from kvasir_runtime.pooling.sentence_transformers import (
    MODULES,
    DenseLayer,
    PoolingType,
    SentenceInputs,
    SentenceModules,
    read_inputs,
    read_modules,
)

Activation = Literal["sigmoid", "softmax", "identity"]
CLASSIFIER = "ForSequenceClassification"
ENCODERS = ("Bert", "XLMRoberta", "Roberta", "ModernBert")
"""Families that have encoders alone, as their architectures begin."""
_EMBEDDERS = ("TextModel", "Model", "ForMaskedLM")
"""Ends of the names of architectures that generate nothing."""
_GENERATING = "LMHeadModel"
"""But those that end so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A vector that is near those of texts that mean the same."""

    normalizes: bool
    """To length 1."""
    dense: tuple[DenseLayer, ...]
    size: int
    """Numbers of a vector."""
    shorter_sizes: tuple[int, ...] | None
    """That its beginning may be cut to; empty: any. None: the model was not trained for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """A number a label."""

    labels: tuple[str, ...]
    activation: Activation
    token_ids: tuple[int, int] | None
    """Of no and yes: the one number is how much likelier the second is as the next token. None: there is a head."""


@dataclass(frozen=True, kw_only=True)
class PoolingDescription:
    architecture: str
    pooling_type: PoolingType
    task: Embedding | Classification
    inputs: SentenceInputs
    is_encoder: bool
    """Tokens see those behind them, so there is no KV cache."""

    @property
    def joins_pairs(self) -> bool:
        """Whether its tokenizer joins two texts as the model was trained to compare them."""
        return self.architecture.startswith(ENCODERS)

    @property
    def needs_whole_prompt(self) -> bool:
        return self.is_encoder or self.pooling_type != "last"

    def positions(self, num_tokens: int) -> range:
        """Of the tokens of a prompt whose hidden states are averaged."""
        match self.pooling_type:
            case "last":
                return range(num_tokens - 1, num_tokens)
            case "cls":
                return range(1)
            case "mean":
                return range(num_tokens)


def describe_pooling(model: ModelConfig) -> PoolingDescription | None:
    """None where the model generates. Raises ModelLoadError, ConfigurationError."""
    reader = _Reader(model)
    return reader.description() if reader.is_pooling else None


@dataclass
class _Reader:
    model: ModelConfig

    @cached_property
    def folder(self) -> Path:
        return Path(self.model.model)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        file = self.folder / "config.json"
        return (read_json_object_if_there(file)) | (self.model.hf_overrides or {})

    @cached_property
    def architecture(self) -> str:
        architectures = self.config.get("architectures")
        return str(architectures[0]) if isinstance(architectures, list) and architectures else ""

    @cached_property
    def modules(self) -> SentenceModules | None:
        return read_modules(self.folder)

    @property
    def is_pooling(self) -> bool:
        if self.model.runner != "auto":
            return self.model.runner == "pooling"
        if self.model.convert != "auto":
            return True
        makes_vectors = self.architecture.endswith((CLASSIFIER, *_EMBEDDERS))
        return (self.folder / MODULES).exists() or (makes_vectors and not self.architecture.endswith(_GENERATING))

    @property
    def is_classifier(self) -> bool:
        if self.model.convert != "auto":
            return self.model.convert == "classify"
        return self.architecture.endswith(CLASSIFIER) or (
            self.modules is not None and self.modules.token_scores is not None
        )

    def description(self) -> PoolingDescription:
        return PoolingDescription(
            architecture=self.architecture,
            pooling_type=self._pooling_type(),
            task=self._classification() if self.is_classifier else self._embedding(),
            inputs=read_inputs(self.folder),
            is_encoder=self._is_encoder,
        )

    @property
    def _is_encoder(self) -> bool:
        """By its family, or as Gemma 3's and Qwen2's embedding models say of themselves."""
        sees_ahead = self.config.get("use_bidirectional_attention") is True or self.config.get("is_causal") is False
        return self.architecture.startswith(ENCODERS) or sees_ahead

    def _pooling_type(self) -> PoolingType:
        """A flag says, else the library's files, else the family: decoders have seen all of a prompt at its end."""
        pooler = self.model.pooler_config
        if pooler is not None and pooler.pooling_type is not None:
            return _BY_FLAG[pooler.pooling_type]
        if self.is_classifier and self.architecture.startswith("ModernBert"):
            return "mean" if self.config.get("classifier_pooling", "cls") == "mean" else "cls"
        if self.modules is not None and self.modules.pooling_type is not None and not self.is_classifier:
            return self.modules.pooling_type
        return "cls" if self.architecture.startswith(ENCODERS) else "last"

    def _embedding(self) -> Embedding:
        modules, pooler = self.modules, self.model.pooler_config
        dense = () if modules is None else modules.dense
        normalizes = True if modules is None else modules.normalizes
        if pooler is not None and pooler.use_activation is not None:
            normalizes = pooler.use_activation
        size = dense[-1].out_features if dense else self.config.get("hidden_size")
        if type(size) is not int:
            raise self._error("hidden_size", "a whole number")
        return Embedding(normalizes=normalizes, dense=dense, size=size, shorter_sizes=self._shorter_sizes())

    def _shorter_sizes(self) -> tuple[int, ...] | None:
        sizes = self.config.get("matryoshka_dimensions")
        if sizes is None:
            return () if self.config.get("is_matryoshka") is True else None
        if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
            raise self._error("matryoshka_dimensions", "a list of whole numbers")
        return tuple(sizes)

    def _classification(self) -> Classification:
        pooler = self.model.pooler_config
        token_ids = self._token_ids()
        labels = self._labels() if token_ids is None else ("LABEL_0",)
        activation = self._activation(len(labels))
        if pooler is not None and pooler.use_activation is False:
            activation = "identity"
        return Classification(labels=labels, activation=activation, token_ids=token_ids)

    def _activation(self, num_labels: int) -> Activation:
        """What the checkpoint was trained with: the library's setting, or the kind of problem."""
        library = self.config.get("sentence_transformers")
        named = library.get("activation_fn") if isinstance(library, dict) else None
        named = named or self.config.get("sbert_ce_default_activation_function")
        if isinstance(named, str):
            kind = named.rpartition(".")[2]
            if kind not in _BY_CLASS:
                raise self._error("activation_fn", f"one of {', '.join(_BY_CLASS)}")
            return _BY_CLASS[kind]
        problem = self.config.get("problem_type")
        if problem == "regression":
            return "identity"
        return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"

    def _labels(self) -> tuple[str, ...]:
        names, number = self.config.get("id2label"), self.config.get("num_labels")
        if isinstance(names, dict) and names:
            return tuple(str(names[key]) for key in sorted(names, key=lambda key: int(key) if key.isdecimal() else -1))
        if number is None:
            number = 2  # transformers' default
        if type(number) is not int or not 0 < number < 2**16:
            raise self._error("num_labels", "a whole number above 0")
        return tuple(f"LABEL_{index}" for index in range(number))

    def _token_ids(self) -> tuple[int, int] | None:
        """A generating model is asked for yes or no, as Qwen3-Reranker was trained to answer."""
        if self.modules is not None and self.modules.token_scores is not None:
            return self.modules.token_scores
        texts = self.config.get("classifier_from_token")
        if texts is None and not self.architecture.endswith("ForCausalLM"):
            return None
        texts = ["no", "yes"] if texts is None else texts
        if not isinstance(texts, list) or len(texts) != 2:
            raise self._error("classifier_from_token", "a list of two tokens, the one for no first")
        file = Path(self.model.tokenizer or self.folder) / "tokenizer.json"
        try:
            vocabulary = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{file} cannot be read, to look up the tokens {texts}: {error}; {ADVICE}") from error
        no, yes = (vocabulary.token_to_id(str(text)) for text in texts)
        if no is None or yes is None:
            raise ConfigurationError(
                f"--convert classify scores by the tokens {texts[0]!r} and {texts[1]!r}, which {file} does not have "
                'both; name others with --hf-overrides \'{"classifier_from_token": ["no", "yes"]}\''
            )
        return no, yes

    def _error(self, name: str, expected: str) -> ModelLoadError:
        seen = shortened(self.config.get(name))
        return ModelLoadError(f"{self.folder / 'config.json'}: {name!r} is {seen}, expected {expected}; {ADVICE}")


_BY_FLAG: Mapping[str, PoolingType] = {"LAST": "last", "MEAN": "mean", "CLS": "cls"}
_BY_CLASS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
