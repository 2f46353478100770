"""What the sentence-transformers library's files beside a checkpoint say: which steps follow the model, which text
stands before its inputs, and how long they may be. A step that is not computed here is refused by its name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvasir_runtime.checkpoint_json import ADVICE, read_json_object, read_json_object_if_there, shortened
from kvasir_runtime.errors import ModelLoadError

PoolingType = Literal["last", "mean", "cls"]
"""Of which tokens' hidden states the mean is taken: the last, all, or the first."""

_MODES: Mapping[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: Mapping[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
MODULES = "modules.json"
NO_LENGTH = 10**9
"""Numbers beyond it stand for no bound."""
_ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU", "Sigmoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A linear layer behind the pooling, from a checkpoint of its own."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """The name of torch's class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    pooling_type: PoolingType | None = None
    """None: not said."""
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    token_scores: tuple[int, int] | None = None
    """Ids of the tokens for no and yes, whose logits make a score; None: it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceInputs:
    prompts: Mapping[str, str]
    """By name, what stands before an input."""
    default_prompt: str | None
    """The name of the one that is taken where none is asked for; None: nothing."""
    max_tokens: int | None
    """None: what the model can."""
    lowercases: bool


def read_modules(folder: Path) -> SentenceModules | None:
    """None where the library's list of modules is not there. Raises ModelLoadError."""
    file = folder / MODULES
    if not file.exists():
        return None
    pooling_type: PoolingType | None = None
    dense: list[DenseLayer] = []
    normalizes, token_scores = False, None
    for module in _listed(file):
        kind, place = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            _check_place(file, module)
        elif kind == "Pooling":
            pooling_type = _pooling_type(place / "config.json")
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalizes = True
        elif kind in ("LogitScore", "CausalScoreHead"):
            token_scores = _token_scores(place / "config.json")
        else:
            raise ModelLoadError(
                f"{file}: module {kind!r} is not computed here; known: Transformer, Pooling, Dense, Normalize, "
                "LogitScore"
            )
    return SentenceModules(
        pooling_type=pooling_type, dense=tuple(dense), normalizes=normalizes, token_scores=token_scores
    )


def read_inputs(folder: Path) -> SentenceInputs:
    """Raises ModelLoadError."""
    lengths = read_json_object_if_there(folder / "sentence_bert_config.json")
    settings = read_json_object_if_there(folder / "config_sentence_transformers.json")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(
            f"{folder / 'config_sentence_transformers.json'}: 'prompts' is {shortened(prompts)}, expected texts by "
            f"name; {ADVICE}"
        )
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"{folder / 'config_sentence_transformers.json'}: 'default_prompt_name' is {shortened(default)}, which is "
            f"none of its prompts, {', '.join(sorted(prompts))}; {ADVICE}"
        )
    max_tokens = lengths.get("max_seq_length")
    if max_tokens is not None and not (type(max_tokens) is int and max_tokens > 0):
        raise ModelLoadError(
            f"{folder / 'sentence_bert_config.json'}: 'max_seq_length' is {shortened(max_tokens)}, expected a whole "
            f"number above 0; {ADVICE}"
        )
    return SentenceInputs(
        prompts=prompts,
        default_prompt=default,
        max_tokens=_tokenizers_length(folder) if max_tokens is None else max_tokens,
        lowercases=bool(lengths.get("do_lower_case", False)),
    )


def _tokenizers_length(folder: Path) -> int | None:
    """Where the library keeps it since version 6, and looked before where it kept none. None: its models say nothing,
    or a number that stands for none."""
    length = read_json_object_if_there(folder / "tokenizer_config.json").get("model_max_length")
    is_known = (folder / MODULES).exists() and type(length) is int and 0 < length < NO_LENGTH
    return length if is_known else None


def _listed(file: Path) -> list[dict[str, Any]]:
    modules = _read(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{file} holds {shortened(modules)}, expected a list of modules; {ADVICE}")
    return modules


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}; {ADVICE}") from error


def _check_place(file: Path, module: dict[str, Any]) -> None:
    if module.get("path"):
        raise ModelLoadError(
            f"{file}: the model lies in the folder {module['path']!r}; serve that folder, with the files of this one "
            "beside it"
        )


def _pooling_type(file: Path) -> PoolingType:
    config = read_json_object(file)
    if config.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt is false; leaving prompts out of the mean is not computed here")
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
        known = [_NAMES[mode] for mode in modes if mode in _NAMES]
    else:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        known = [_MODES[mode] for mode in modes if mode in _MODES]
    if len(modes) != 1 or not known:
        raise ModelLoadError(
            f"{file}: pooling is {', '.join(modes) or 'none'}; one of cls, mean and lasttoken is computed here"
        )
    return known[0]


def _dense(folder: Path) -> DenseLayer:
    file = folder / "config.json"
    config = read_json_object(file)
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise ModelLoadError(f"{file}: in_features and out_features are {sizes}, expected whole numbers; {ADVICE}")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelLoadError(
            f"{file}: activation {activation!r} is not computed here; known: {', '.join(_ACTIVATIONS)}"
        )
    return DenseLayer(
        folder=folder,
        in_features=config["in_features"],
        out_features=config["out_features"],
        bias=bool(config.get("bias", True)),
        activation=activation,
    )


def _token_scores(file: Path) -> tuple[int, int]:
    config = read_json_object(file)
    no, yes = config.get("false_token_id"), config.get("true_token_id")
    if type(no) is not int or type(yes) is not int:
        raise ModelLoadError(
            f"{file}: false_token_id and true_token_id are {shortened((no, yes))}; a score of two tokens' logits is "
            "computed here, so both must be token ids"
        )
    return no, yes
