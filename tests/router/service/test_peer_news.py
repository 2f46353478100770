"""What routers tell each other, on the wire: read as it was written, and only of who has the secret."""

import hmac

import msgspec
import pytest

from kvasir_router.admission.queued_request import Waiting
from kvasir_router.service.peer_news import Dispatched, Finished, MalformedNewsError, News, Prefilled, Seal

ME = b"sixteen bytes it"
EVENTS = [
    Dispatched(1, "http://a:8000", "x", 16, 100, 256, 0),
    Prefilled(1, 0, 0.25),
    Prefilled(2, None, 0.5),
    Finished(1),
]
SERVICES = {"models/llama": News(EVENTS, Waiting(1.5, 300.0)), "models/idle": News([], None)}


def test_news_are_read_as_they_were_written() -> None:
    number, services = Seal("secret").read(Seal("secret").write(ME, 7, SERVICES))
    assert (number, services) == (7, SERVICES)
    assert services["models/llama"].waiting.seconds == 1.5  # type: ignore[union-attr]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_nobody_is_believed_whose_message_was_changed(part: int) -> None:
    message = Seal("secret").write(ME, 7, SERVICES)
    message[part] = bytes([message[part][0] ^ 1]) + message[part][1:]
    with pytest.raises(MalformedNewsError, match="another secret"):
        Seal("secret").read(message)


@pytest.mark.parametrize("secret", [None, "other"])
def test_nobody_is_believed_who_has_another_secret(secret: str | None) -> None:
    with pytest.raises(MalformedNewsError, match="another secret"):
        Seal("secret").read(Seal(secret).write(ME, 7, SERVICES))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 1, {}], "version 1"),
        ([2, 1], "no news"),
        ([2, 1, {"s": [[["d", 1]], None]}], "no news"),
        ([2, 1, {"s": [[["q", 1]], None]}], "no news"),
        ("text", "no news"),
    ],
)
def test_what_makes_no_sense_is_no_news(content: object, message: str) -> None:
    payload = msgspec.msgpack.encode(content)
    seal = hmac.digest(b"", b"kvasir peers\n" + ME + payload, "sha256")
    with pytest.raises(MalformedNewsError, match=message):
        Seal(None).read([ME, payload, seal])


@pytest.mark.parametrize("num_parts", [0, 1, 2, 4])
def test_a_message_has_three_parts(num_parts: int) -> None:
    with pytest.raises(MalformedNewsError, match=f"{num_parts} parts"):
        Seal(None).read([b""] * num_parts)


@pytest.mark.parametrize("moved", [-1, 1])
def test_a_senders_name_ends_where_it_should(moved: int) -> None:
    sender, payload, seal = Seal("secret").write(ME, 7, SERVICES)
    both, end = sender + payload, len(sender) + moved
    with pytest.raises(MalformedNewsError, match=f"name of {end} bytes"):
        Seal("secret").read([both[:end], both[end:], seal])
