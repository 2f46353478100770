"""A group's record: what of it counts, which nodes it blames, and that an edited one does no harm."""

import pytest
from tests.operator.cluster_objects import NOW, stateful_set

from kvasir_operator.groups.record import RESTARTS, RestartRecord


def test_it_is_read_as_it_was_written() -> None:
    record = RestartRecord(2, NOW, "pod a: ended", {"n1": 2}, frozenset({"uid-a"}))
    assert RestartRecord.of(stateful_set(**{RESTARTS: record.text()})) == record
    assert RestartRecord.of(stateful_set()) == RestartRecord()


RECORD = RestartRecord(1, NOW, "it failed", {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"restarts": 1}',
        RECORD.text().replace(NOW, "soon"),
        RECORD.text().replace('"restarts": 1', '"restarts": "x"'),
    ],
)
def test_what_somebody_has_edited_is_none(text: str) -> None:
    assert RestartRecord.of(stateful_set(**{RESTARTS: text})) == RestartRecord()


def test_after_an_hour_it_counts_no_more() -> None:
    record = RestartRecord(2, NOW, "it failed", {"n1": 2})
    assert record.current("2026-11-20T10:59:59Z") == record
    assert record.current("2026-11-20T11:00:00Z") == RestartRecord()


def test_nodes_where_failures_began_more_than_once_are_avoided() -> None:
    record = RestartRecord()
    for node in ("n2", "n1", None, "n2", "n3", "n3"):
        record = record.restarted(NOW, "it failed", node)
    assert record.avoided_nodes == ("n2", "n3")
    assert record.num_restarts == 6


def test_it_does_not_grow_without_end() -> None:
    record = RestartRecord()
    for number in range(100):
        record = record.restarted(NOW, "it failed", f"n{number}")
    assert len(record.nodes) == 16
