import pytest

from kvasir_router.errors import InvalidDeadlineError
from kvasir_router.request import deadline_seconds_of


def header(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), (b"x-kvasir-deadline-seconds", value)]


@pytest.mark.parametrize(("value", "seconds"), [(b"2.5", 2.5), (b"30", 30.0), (b" 1e1 ", 10.0)])
def test_a_deadline_is_a_number_of_seconds(value: bytes, seconds: float) -> None:
    assert deadline_seconds_of(header(value)) == seconds


def test_without_the_header_there_is_none() -> None:
    assert deadline_seconds_of([(b"accept", b"*/*")]) is None


@pytest.mark.parametrize("value", [b"0", b"-1", b"soon", b"", b"inf", b"nan", b"\xff", b"5s"])
def test_anything_else_is_refused_with_what_was_seen(value: bytes) -> None:
    with pytest.raises(InvalidDeadlineError, match="is not a positive number of seconds; write for example") as error:
        deadline_seconds_of(header(value))
    assert error.value.status == 400
    assert repr(value.decode("latin-1")) in str(error.value)
