"""Look-ups into config.json take no value of another type, and errors name key, value and file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.models.hf_config import HuggingFaceConfig, read_config


def config_of(**values: Any) -> HuggingFaceConfig:
    return HuggingFaceConfig(Path("folder/config.json"), values)


@pytest.mark.parametrize(
    ("look_up", "value", "message"),
    [
        (lambda c: c.integer("key"), True, r"folder/config\.json: 'key' is True, expected a whole number"),
        (lambda c: c.integer("key"), 2.5, r"'key' is 2\.5, expected a whole number"),
        (lambda c: c.number("key", 1.0), "1", r"'key' is '1', expected a number"),
        (lambda c: c.optional_number("key"), True, r"'key' is True, expected a number"),
        (lambda c: c.flag("key", False), 1, r"'key' is 1, expected true or false"),
        (lambda c: c.text("key", ""), 1, r"'key' is 1, expected a string"),
        (lambda c: c.texts("key"), [1], r"'key' is \[1\], expected a list of strings"),
        (lambda c: c.mapping("key"), [1], r"'key' is \[1\], expected an object"),
    ],
)
def test_a_value_of_another_type_is_refused(
    look_up: Callable[[HuggingFaceConfig], object], value: object, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        look_up(config_of(key=value))


def test_null_and_absence_give_the_default() -> None:
    for config in (config_of(), config_of(key=None)):
        assert config.integer("key", 3) == 3
        assert config.number("key", 0.5) == 0.5
        assert config.flag("key", True) is True
        assert config.mapping("key") == {}
        with pytest.raises(ModelLoadError, match="'key' is missing"):
            config.integer("key")


def test_null_switches_an_optional_number_off() -> None:
    assert config_of().optional_number("key", 50.0) == 50.0
    assert config_of(key=None).optional_number("key", 50.0) is None
    assert config_of(key=30).optional_number("key", 50.0) == 30.0


def test_the_saved_type_has_a_new_and_an_old_name() -> None:
    assert config_of(torch_dtype="float16").dtype == "float16"
    assert config_of(torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"
    assert config_of().dtype is None


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read as a JSON object"):
        read_config(tmp_path)
