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
        (lambda c: c.integer("key"), 0, r"'key' is 0, expected a whole number from 1 to 2147483647; correct the file"),
        (lambda c: c.integer("key", most=9), 10, r"'key' is 10, expected a whole number from 1 to 9"),
        (lambda c: c.number("key"), float("nan"), r"'key' is nan, expected a number above 0"),
        (lambda c: c.number("key"), 1e-300, r"'key' is 1e-300, expected a number above 0"),
        (lambda c: c.number("key"), float("inf"), r"'key' is inf, expected a number above 0"),
        (lambda c: c.numbers("key"), [1.0, 0], r"'key' is \[1\.0, 0\], expected a list of numbers above 0"),
        (lambda c: c.integers("key"), [-1], r"'key' is \[-1\], expected a list of whole numbers from 0"),
        (lambda c: c.object("key").integer("inner"), {"inner": "1"}, r"'key\.inner' is '1', expected a whole number"),
        (lambda c: c.number("key", 1.0), "1", r"'key' is '1', expected a number"),
        (lambda c: c.optional_number("key", None), True, r"'key' is True, expected a number"),
        (lambda c: c.flag("key", False), 1, r"'key' is 1, expected true or false"),
        (lambda c: c.text("key", ""), 1, r"'key' is 1, expected a string"),
        (lambda c: c.texts("key"), [1], r"'key' is \[1\], expected a list of strings"),
        (lambda c: c.object("key"), [1], r"'key' is \[1\], expected an object"),
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
        assert config.object("key").values == {}
        with pytest.raises(ModelLoadError, match="'key' is missing"):
            config.integer("key")


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert config_of(key=32.0).integer("key") == 32
    assert config_of(key=[0.0, 2]).integers("key") == [0, 2]


def test_null_switches_an_optional_number_off() -> None:
    assert config_of().optional_integer("key", 4096) == 4096
    assert config_of(key=None).optional_integer("key", 4096) is None
    assert config_of().optional_number("key", 50.0) == 50.0
    assert config_of(key=None).optional_number("key", 50.0) is None
    assert config_of(key=30).optional_number("key", 50.0) == 30.0


def test_the_saved_type_has_a_new_and_an_old_name() -> None:
    assert config_of(torch_dtype="float16").dtype == "float16"
    assert config_of(torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"
    assert config_of().dtype is None


def test_numbers_that_only_python_writes_stand_in_the_way_of_no_other_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "key": 3}')
    assert read_config(tmp_path).integer("key") == 3


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, "\xff"])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json (cannot be read as|holds \[1\], expected) a JSON object"):
        read_config(tmp_path)
