"""A request's body to its model, and pydantic's findings to one sentence that a client can act on."""

import difflib
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.protocol import RequestModel

MAX_SHOWN_INPUT = 80  # characters of a wrong value that an error repeats
MAX_LISTED_ERRORS = 1000
"""Describing one takes some 15 us, and nothing else runs meanwhile."""
Model = TypeVar("Model", bound=RequestModel)


def parse(model: type[Model], body: bytes) -> Model:
    """Raises InvalidRequestError that names the field, what was seen and what is expected."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MAX_LISTED_ERRORS:
            raise InvalidRequestError(
                f"{error.error_count()} fields of the request are unknown or wrong, too many to name one; "
                "send only fields that this route has"
            ) from None
        details = error.errors(include_url=False)
        if details[0]["type"] == "json_invalid":
            raise _malformed_body(body, details[0]) from error
        raise _invalid_field(model, details) from error


def _malformed_body(body: bytes, detail: ErrorDetails) -> InvalidRequestError:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequestError(
            f"the body is not valid UTF-8: byte 0x{body[error.start]:02x} at position {error.start} ({error.reason}); "
            "send JSON encoded as UTF-8"
        )
    return InvalidRequestError(f"the body is not valid JSON: {detail['ctx']['error']}; send one JSON object")


def _invalid_field(model: type[RequestModel], details: list[ErrorDetails]) -> InvalidRequestError:
    """Of several errors the one that helps most: a thing we cannot do, an unknown key, the innermost wrong value."""
    unsupported = [detail for detail in details if detail["type"] == "unsupported"]
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    if unknown and not unsupported:
        return _unknown_fields(model, unknown)
    first = unsupported[0] if unsupported else max(details, key=lambda detail: _field_name(detail["loc"]).count("["))
    field = _field_name(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{field} is required, but it was not given", field)
    if not field:
        return InvalidRequestError(first["msg"], first["type"] if first["type"] in model.model_fields else None)
    same_field = (_expected(detail) for detail in details if _field_name(detail["loc"]) == field)
    expected = "; or ".join(dict.fromkeys(same_field))
    return InvalidRequestError(f"{field}: {_shown(first['input'])} was given, but {expected}", field)


def _unknown_fields(model: type[RequestModel], details: list[ErrorDetails]) -> InvalidRequestError:
    location = details[0]["loc"]
    names = [str(detail["loc"][-1]) for detail in details]
    where = _field_name(location[:-1]) or "the request"
    close = difflib.get_close_matches(names[0], model.model_fields, n=1) if len(location) == 1 else []
    hint = f"did you mean {close[0]!r}?" if close else "leave it out or correct its name"
    message = f"unknown field {', '.join(repr(name) for name in names)} in {where}; {hint}"
    return InvalidRequestError(message, _field_name(location) or names[0])


def _field_name(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; pydantic's names for a union's branches are left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("bool", "int", "str"):
            name += f".{part}" if name else part
    return name


def _expected(detail: ErrorDetails) -> str:
    message = detail["msg"]
    return message.replace("Input should be", "it should be", 1) if message.startswith("Input") else message


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_INPUT else f"{text[:MAX_SHOWN_INPUT]}..."
