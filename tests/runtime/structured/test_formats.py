"""Texts of JSON Schema's formats, as regular expressions."""

import re

import pytest
from jsonschema import Draft202012Validator

from kvasir_runtime.structured.formats import REGEXES

TAKEN = [
    ("date", "2024-02-29 2000-02-29 2023-12-31 2023-04-30 0001-01-01"),
    ("time", "12:00:00Z 23:59:59.5+01:00 00:00:00.123456789z"),
    ("date-time", "2024-02-29T00:00:00Z 2024-02-29t00:00:00z"),
    ("duration", "P1Y2M3D PT5M P3W P1DT1H"),
    ("email", "a.b+c@example.org a@b"),
    ("hostname", "a-b.example.org localhost"),
    ("ipv4", "127.0.0.1 255.0.10.249"),
    (
        "ipv6",
        "::1 :: fe80::1 1:2:3:4:5:6:7:8 1:: 2001:db8::ff00:42:8329 ::ffff:1.2.3.4 1:2:3:4:5:6:1.2.3.4 1::2:1.2.3.4",
    ),
    ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
    ("uri", "https://example.org https://example.org/ http://a.b:80/x%20y?z=/#f mailto:a@b.c urn:isbn:123"),
    ("json-pointer", "/ /a/0 /a~1b/~0 /\u00e5//"),
    ("relative-json-pointer", "0 0# 12/a/b 1/~0"),
]
REFUSED = [
    ("date", "2023-02-29 1900-02-29 2023-13-01 0000-01-01 2023-04-31 2023-1-1"),
    ("time", "24:00:00Z 12:00:00 12:60:00Z 23:59:60Z"),
    ("duration", "P PT P1D1Y 1D P1YT"),
    ("email", "a@ a..b@c.d .a@b.c a"),
    ("hostname", "-a a- a..b"),
    ("ipv4", "256.0.0.1 01.0.0.1 1.2.3"),
    ("ipv6", "1:2 1::2::3 1:2:3:4:5:6:7:8:9 :1 ::1.2.3 ::1.2.3.256 1:2:3:4:5:6:7:1.2.3.4 1:2::3:4:5:6:1.2.3.4"),
    ("uri", "abc http://-a :x"),
    ("json-pointer", "a /~ /~2 #/a"),
    ("relative-json-pointer", "/a 01 -1 1#/a #"),
]


@pytest.mark.parametrize(("name", "texts"), TAKEN)
def test_a_text_of_the_format_is_taken(name: str, texts: str) -> None:
    for text in texts.split():
        assert re.fullmatch(REGEXES[name], text), text
        Draft202012Validator.FORMAT_CHECKER.check(text, name)


@pytest.mark.parametrize(("name", "texts"), REFUSED)
def test_another_text_is_not(name: str, texts: str) -> None:
    for text in texts.split():
        assert not re.fullmatch(REGEXES[name], text), text
