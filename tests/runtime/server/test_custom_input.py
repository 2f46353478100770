"""A custom tool's text, out of pieces of JSON that are cut anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_runtime.server.custom_input import CustomInput


def read(text: str, cuts: list[int]) -> str:
    reader = CustomInput()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return "".join(map(reader.feed, pieces)) + reader.finish()


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200)))
def test_the_text_is_the_arguments_however_it_is_cut(text: str, is_ascii: bool, cuts: list[int]) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=is_ascii), cuts) == text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\', "a\\"),
        ('{"input": "a\\ud83d', "a\\ud83d"),
        ('{"input": "a\\x b"}', 'a\\x b"}'),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"input": ""}', ""),
        ("", ""),
    ],
)
def test_what_is_no_such_object_or_cut_is_the_text_itself(written: str, expected: str) -> None:
    assert read(written, []) == expected
    assert read(written, list(range(len(written)))) == expected
