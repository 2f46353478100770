"""Decodes an engine's load report from what it publishes: one msgpack array, a version before the report's fields."""

from typing import Annotated

import msgspec

from kvasir_router.service.load_report import LoadReport

_VERSION = 1
_MAX_DATA_PARALLEL = 256  # each rank takes a port and a socket


class MalformedReportError(Exception):
    """The message is no load report that this router can read."""


class _Frame(msgspec.Struct, array_like=True, gc=False):
    """Further fields at the end are another's business."""

    version: int
    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int
    running_uncached_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps_per_second: float
    prefill_tokens_per_second: float | None
    arrived: tuple[str, ...]
    instance: str
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_DATA_PARALLEL)] = 1
    kv_transfer_port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)] | None = None


_decoder = msgspec.msgpack.Decoder(_Frame)


def decode_load(payload: bytes) -> LoadReport:
    """Raises MalformedReportError."""
    try:
        frame = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReportError(f"a message of {len(payload)} bytes is no load report: {error}") from error
    if frame.version != _VERSION:
        raise MalformedReportError(f"a load report has version {frame.version}; this router reads version {_VERSION}")
    return LoadReport(
        num_running=frame.num_running,
        num_waiting=frame.num_waiting,
        waiting_uncached_tokens=frame.waiting_uncached_tokens,
        running_uncached_tokens=frame.running_uncached_tokens,
        kv_used_tokens=frame.kv_used_tokens,
        kv_capacity_tokens=frame.kv_capacity_tokens,
        steps_per_second=frame.steps_per_second,
        prefill_tokens_per_second=frame.prefill_tokens_per_second,
        arrived=frame.arrived,
        instance=frame.instance,
        data_parallel_size=frame.data_parallel_size,
        kv_transfer_port=frame.kv_transfer_port,
    )
