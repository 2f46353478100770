"""What a checkpoint recommends is checked before the server is ready, as strictly as what requests bring."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.server.resolving import SamplingDefaults, load_sampling_defaults

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NO_NUMBERS: list[Any] = [True, "0.6", [], [0.6], {}, float("nan"), float("inf"), -2]


def defaults(folder: Path, generation: object, tokenizer_eos: int | None = None, **config: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))
    return load_sampling_defaults(folder, tokenizer_eos, seed=None)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_value_that_no_request_may_bring_is_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: '{name}' is .*: Input should be .*; correct"):
        defaults(tmp_path, {name: value})


@pytest.mark.parametrize("value", [True, "256", 2.5, [[256]], [None], {}, {"a": 1}, list(range(2000))])
def test_ends_of_sequence_are_token_ids(value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: 'eos_token_id' is "):
        defaults(tmp_path, {"eos_token_id": value})
    with pytest.raises(ModelLoadError, match=r"/config\.json: 'eos_token_id' is "):
        defaults(tmp_path, {}, eos_token_id=value)


@pytest.mark.parametrize("content", [[1], "x", None])
def test_a_file_without_an_object_is_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json holds .*, expected a JSON object"):
        defaults(tmp_path, content)


def test_whole_numbers_may_have_a_point_and_null_says_nothing(tmp_path: Path) -> None:
    seen = defaults(tmp_path, {"top_k": 50.0, "temperature": 1, "top_p": None, "eos_token_id": 256.0, "do_sample": "?"})
    assert (seen.top_k, seen.temperature, seen.top_p, seen.eos_token_ids) == (50, 1.0, None, (256,))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(3, 4, (3, 9)), ([3, 5], None, (3, 5, 9)), (None, [4, 9], (4, 9)), ([], 4, (4, 9)), (None, None, (9,))],
)
def test_ends_of_generation_config_go_first_and_the_tokenizers_joins_them(
    generation: object, config: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert defaults(tmp_path, {"eos_token_id": generation}, 9, eos_token_id=config).eos_token_ids == expected


def test_what_else_is_wrong_in_config_json_is_the_models_affair(tmp_path: Path) -> None:
    assert defaults(tmp_path, {}, temperature="hot", eos_token_id=4).eos_token_ids == (4,)
