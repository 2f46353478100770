"""Load reports as they are published."""

import msgspec
import pytest
from msgspec.structs import astuple

from kvasir_router.service.load_report import MalformedReportError, decode_load

FIELDS = [3, 2, 300, 40, 5000, 60_000, 7.5, 812.5, ["one", "two"], "0123456789abcdef"]


def test_a_report_is_a_version_and_its_fields_in_order() -> None:
    report = decode_load(msgspec.msgpack.encode([1, *FIELDS]))
    assert astuple(report) == (3, 2, 300, 40, 5000, 60_000, 7.5, 812.5, ("one", "two"), "0123456789abcdef", 1, None)


def test_an_engine_that_has_prefilled_nothing_has_no_rate() -> None:
    fields = [*FIELDS]
    fields[7] = None
    assert decode_load(msgspec.msgpack.encode([1, *fields])).prefill_tokens_per_second is None


@pytest.mark.parametrize("size", [1, 256])
def test_an_engine_says_how_many_data_parallel_ranks_it_has(size: int) -> None:
    assert decode_load(msgspec.msgpack.encode([1, *FIELDS, size])).data_parallel_size == size


@pytest.mark.parametrize("size", [0, 257])
def test_no_engine_has_so_many_ranks(size: int) -> None:
    with pytest.raises(MalformedReportError, match="no load report"):
        decode_load(msgspec.msgpack.encode([1, *FIELDS, size]))


@pytest.mark.parametrize("port", [None, 1, 65535])
def test_an_engine_that_exchanges_kv_says_at_which_port(port: int | None) -> None:
    assert decode_load(msgspec.msgpack.encode([1, *FIELDS, 1, port])).kv_transfer_port == port


@pytest.mark.parametrize("port", [0, 65536])
def test_no_engine_listens_there(port: int) -> None:
    with pytest.raises(MalformedReportError, match="no load report"):
        decode_load(msgspec.msgpack.encode([1, *FIELDS, 1, port]))


def test_fields_that_came_later_are_ignored() -> None:
    assert decode_load(msgspec.msgpack.encode([1, *FIELDS, 1, None, "later"])) == decode_load(
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
