"""Secrets that a test can tell from all other words, and the search for them."""

import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping

PLANTED = "planted-"


def planted(name: str) -> str:
    """A value that nothing else in the world has."""
    return f"{PLANTED}{name}-{secrets.token_hex(16)}"


def decoded(secret: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Values of a Secret, as the API server stores it."""
    return [b64decode(value).decode() for value in secret.get("data", {}).values()]


def leaks(values: Iterable[str], shown: Mapping[str, str]) -> list[str]:
    """Where of what is shown, by its name, one of the values is to be read, plain or in base64."""
    values = list(values)
    assert all(values), "an empty value is everywhere"
    forms = {form for value in values for form in (value, b64encode(value.encode()).decode().rstrip("="))}
    return [
        f"{where}: {text[max(0, text.index(form) - 80) :][:200]}"
        for where, text in shown.items()
        for form in forms
        if form in text
    ]
