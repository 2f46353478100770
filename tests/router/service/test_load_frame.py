"""Load reports as they are published."""

from dataclasses import astuple

import msgspec
import pytest

from kvasir_router.service.load_frame import MalformedReportError, decode_load

FIELDS = [3, 2, 300, 40, 5000, 60_000, 7.5, 812.5, ["one", "two"], "0123456789abcdef"]


def test_a_report_is_a_version_and_its_fields_in_order() -> None:
    report = decode_load(msgspec.msgpack.encode([1, *FIELDS]))
    assert astuple(report) == (3, 2, 300, 40, 5000, 60_000, 7.5, 812.5, ("one", "two"), "0123456789abcdef")


def test_an_engine_that_has_prefilled_nothing_has_no_rate() -> None:
    fields = [*FIELDS]
    fields[7] = None
    assert decode_load(msgspec.msgpack.encode([1, *fields])).prefill_tokens_per_second is None


def test_fields_that_came_later_are_ignored() -> None:
    assert decode_load(msgspec.msgpack.encode([1, *FIELDS, "later"])) == decode_load(
        msgspec.msgpack.encode([1, *FIELDS])
    )


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", *map(msgspec.msgpack.encode, ([], [1], [1, *FIELDS[:-1]], [1, "many", *FIELDS[1:]], {}, 7))],
)
def test_what_is_no_report_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedReportError, match="no load report"):
        decode_load(payload)


def test_another_version_is_refused() -> None:
    with pytest.raises(MalformedReportError, match="version 2; this router reads version 1"):
        decode_load(msgspec.msgpack.encode([2, *FIELDS]))
