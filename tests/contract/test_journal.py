"""A stream's journal crosses a border twice: the engine writes it, the router keeps it, another engine reads it."""

from dataclasses import replace

import pytest

from kvasir_router.relay import journal as router
from kvasir_router.relay.body import BodyBudget
from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.detokenizer import TextOptions
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.server import journal as runtime
from kvasir_runtime.transfer.params import KvTransferParams

REQUEST = GenerateRequest(
    request_id="cmpl-1",
    spec=RequestSpec(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=8, seed=2**64 - 1)),
    text=TextOptions(),
    n=2,
)
PARAMS = KvTransferParams(do_remote_prefill=True, remote_host="h", remote_port=1, transfer_id="k")
DELTAS = [
    (SequenceDelta(index=0, token_ids=[5], num_cached_tokens=16), b'data: {"text":"a"}\n\n'),
    (SequenceDelta(index=1, token_ids=[6, 7]), b""),
    (SequenceDelta(index=0, token_ids=[8], finish_reason="stop"), b'data: {"text":"b"}\n\n'),
]


def test_where_a_moved_streams_blocks_are_is_told_to_the_next_engine_alone() -> None:
    one = replace(REQUEST, n=1)
    writer = runtime.JournalWriter([one], 1700000000, "digest")
    moved = writer.begin() + writer.write(*DELTAS[0]) + writer.write_move(PARAMS)
    for stream, expected in ((moved, PARAMS), (moved + writer.write(*DELTAS[0]), None)):
        kept = router.Journal(BodyBudget(10_000))
        kept.keep(kept.split(stream)[1])
        journal = runtime.read_journal(kept.lines)
        assert journal.moved == expected
        for transfer, used in ((KvTransferConfig(kv_connector="NixlConnector"), expected), (None, None)):
            [resumed] = journal.continued([one], "digest", vocab_size=10, is_stream=True, kv_transfer=transfer)
            assert resumed.spec.kv_transfer_params == used


@pytest.mark.parametrize("num_bytes_spare", [0, -1])
def test_an_engine_knows_how_long_a_journal_the_router_keeps(num_bytes_spare: int) -> None:
    """The first engine's lines and the second's together."""
    first = runtime.JournalWriter([REQUEST], 1700000000, "digest")
    begun = runtime.read_journal(lines_of(first.begin()))
    num_bytes = router.JOURNAL_BOUNDS.max_bytes - len(lines_of(first.write(*DELTAS[1]))) - num_bytes_spare
    headers = {runtime.RESUMABLE_HEADER: "1"}
    second = runtime.event_writer(headers, [REQUEST], 1, "digest", replace(begun, num_bytes=num_bytes))
    kept = router.Journal(BodyBudget(2**30))
    kept.keep(b"x" * num_bytes)
    kept.keep(lines_of(second.write(*DELTAS[1])))
    assert (second.can_continue, kept.is_given_up) == ((True, False) if num_bytes_spare == 0 else (False, True))


def lines_of(stream: bytes) -> bytes:
    return router.Journal(BodyBudget(10_000)).split(stream)[1]


def test_the_router_sees_that_a_stream_is_moved() -> None:
    writer = runtime.JournalWriter([REQUEST], 1700000000, "digest")
    kept = router.Journal(BodyBudget(10_000))
    blocks = [
        writer.begin(),
        *(writer.write(delta, event) for delta, event in DELTAS),
        writer.write_usage(b"data: {}\n\n"),
    ]
    for block in blocks:
        kept.keep(kept.split(block)[1])
        assert not kept.is_moved
    kept.keep(kept.split(writer.write_move(PARAMS))[1])
    assert kept.is_moved


def test_the_events_of_one_line_are_one_block_until_the_client_has_them() -> None:
    """Cut anywhere: the client has all of them and the router their line, or neither."""
    events = [b"event: a\ndata: 1\n\n", b"event: b\ndata: 2\n\n", b"event: c\ndata: 3\n\n"]
    writer = runtime.JournalWriter([REQUEST], 1700000000, "digest")
    stream = writer.begin() + writer.write(SequenceDelta(index=0, token_ids=[5]), b"".join(events))
    for cut in range(len(stream) + 1):
        shown, lines = router.Journal(BodyBudget(10_000)).split(stream[:cut])
        is_whole = cut == len(stream)
        assert (shown, lines.count(b"[0,[5]")) == ((b"".join(events), 1) if is_whole else (b"", 0))


def test_headers_are_the_same() -> None:
    assert router.RESUMABLE_HEADER == runtime.RESUMABLE_HEADER
    assert router.JOURNAL_HEADER == runtime.JOURNAL_HEADER
    assert router.JOURNAL_BOUNDS.max_bytes == runtime.MAX_JOURNAL_BYTES


def test_what_an_engine_writes_another_reads_behind_the_clients_body() -> None:
    writer = runtime.JournalWriter([REQUEST], 1700000000, "digest")
    stream = writer.begin() + b"".join(writer.write(delta, event) for delta, event in DELTAS)
    kept = router.Journal(BodyBudget(10_000))
    events, lines = kept.split(stream)
    kept.keep(lines)
    assert events == b"".join(event for _, event in DELTAS)

    body, journal = runtime.split_body(b"{}" + kept.lines, {router.JOURNAL_HEADER: "2"})
    assert body == b"{}"
    assert journal.beginning == runtime.Beginning("cmpl-1", 1700000000, [2**64 - 1], "digest")
    assert dict(journal.sequences) == {
        0: SequenceDelta(index=0, token_ids=[5, 8], num_cached_tokens=16, finish_reason="stop"),
        1: SequenceDelta(index=1, token_ids=[6, 7]),
    }
    [resumed] = journal.continued([REQUEST], "digest", vocab_size=10, is_stream=True)
    assert (resumed.request_id, resumed.arrival_time) == ("cmpl-1", 1700000000.0)
    assert resumed.spec.sampling.seed == 2**64 - 1
