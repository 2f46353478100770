"""What an engine says of its load, published over ZMQ: a msgpack array of a version and the fields in their order."""

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec.structs import replace

REPORT_LIFETIME_SECONDS = 3.0
"""An engine that has work reports every second: after so long it is silent, and its last word counts no more."""
_VERSION = 1
_MAX_DATA_PARALLEL = 256  # each rank takes a port and a socket


class MalformedReportError(Exception):
    """The message is no load report that this router can read."""


class LoadReport(msgspec.Struct, frozen=True, gc=False):
    """Further fields at the end are another's business."""

    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int  # prompt tokens still to be computed of requests that have not started
    running_uncached_tokens: int  # the same of requests whose prefill has begun
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps_per_second: float
    prefill_tokens_per_second: float | None  # None until it has prefilled anything
    arrived: tuple[str, ...]  # x-request-ids received since the last report
    instance: str  # of the engine's process: another one has an empty cache
    # Ranks of the engine, each of which publishes for itself.
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_DATA_PARALLEL)] = 1
    # Of rank 0's side channel, that of rank r being r higher. None: it does not exchange cached prefixes with others.
    kv_transfer_port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)] | None = None

    @property
    def only_decodes(self) -> bool:
        is_prefilling = self.num_waiting or self.waiting_uncached_tokens or self.running_uncached_tokens
        return bool(self.num_running and self.steps_per_second and not is_prefilling)

    def holds(self, age_seconds: float) -> bool:
        """What has no work may be silent."""
        return age_seconds <= REPORT_LIFETIME_SECONDS or not (self.num_running or self.num_waiting)


_FIELDS = [
    (each.name, each.type) if each.required else (each.name, each.type, each.default)
    for each in msgspec.structs.fields(LoadReport)
]
_decoder = msgspec.msgpack.Decoder(msgspec.defstruct("_Frame", [("version", int), *_FIELDS], array_like=True))


def decode_load(payload: bytes) -> LoadReport:
    """Raises MalformedReportError."""
    try:
        version, *fields = msgspec.structs.astuple(_decoder.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReportError(f"a message of {len(payload)} bytes is no load report: {error}") from error
    if version != _VERSION:
        raise MalformedReportError(f"a load report has version {version}; this router reads version {_VERSION}")
    return LoadReport(*fields)


def of_all_ranks(report: LoadReport, others: Collection[LoadReport]) -> LoadReport:
    """One rank's report, with the load of the engine's other ranks added."""
    ranks = (report, *others)
    rates = [rank.prefill_tokens_per_second for rank in ranks if rank.prefill_tokens_per_second is not None]
    return replace(
        report,
        num_running=sum(rank.num_running for rank in ranks),
        num_waiting=sum(rank.num_waiting for rank in ranks),
        waiting_uncached_tokens=sum(rank.waiting_uncached_tokens for rank in ranks),
        running_uncached_tokens=sum(rank.running_uncached_tokens for rank in ranks),
        kv_used_tokens=sum(rank.kv_used_tokens for rank in ranks),
        kv_capacity_tokens=sum(rank.kv_capacity_tokens for rank in ranks),
        steps_per_second=sum(rank.steps_per_second for rank in ranks),
        prefill_tokens_per_second=sum(rates) if rates else None,
    )
