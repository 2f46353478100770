"""What a request on its way remembers of the engines that it was at."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.errors import UpstreamBrokenError, UpstreamRefusedError
from kvasir_router.job import Job
from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.relay.body import BodyBudget
from kvasir_router.relay.journal import Journal


def test_whose_kv_a_moved_stream_has_is_remembered_while_others_refuse_it() -> None:
    journal = Journal(BodyBudget(1000))
    exchange = SimpleNamespace(journal=journal, has_started=True, can_go_elsewhere=True)
    unused = cast(Any, None)
    job = Job(cast(Any, exchange), unused, unused, unused, b"", 0.0, 1)
    tried(job, "a", "1")
    journal.keep(b'[0,[5],null,0]\n[0,[],null,0,{"remote_host":"a"}]\n')
    job.count_failure("a", UpstreamBrokenError("", "broken"))
    assert job.moved_from == "1"
    tried(job, "b", "2")
    job.count_failure("b", UpstreamRefusedError("", "refused"))
    assert (job.revision, job.moved_from) == ("2", "1")
    tried(job, "c", "3")
    journal.keep(b"[0,[6],null,0]\n")
    job.count_failure("c", UpstreamBrokenError("", "broken"))
    assert job.moved_from is None


def test_a_stream_that_was_handed_over_may_fail_once_more_than_others() -> None:
    """Until it gets further: what becomes of it then is as without the handover."""
    journal = Journal(BodyBudget(1000))
    exchange = SimpleNamespace(journal=journal, has_started=True, can_go_elsewhere=True)
    unused = cast(Any, None)
    job = Job(cast(Any, exchange), unused, unused, unused, b"", 0.0, 0)
    tried(job, "a", "1")
    journal.keep(b'[0,[5],null,0]\n[0,[],null,0,{"remote_host":"a"}]\n')
    job.count_move("a")
    assert (job.moved_from, job.lost_reason, job.tried) == ("1", "moved", {"a"})
    tried(job, "b", "1")
    assert job.count_failure("b", UpstreamBrokenError("", "broken"))
    tried(job, "a", "1")
    assert not job.count_failure("a", UpstreamBrokenError("", "broken"))


def test_a_stream_that_gets_further_where_it_was_moved_to_has_no_more_failures_than_others() -> None:
    journal = Journal(BodyBudget(1000))
    exchange = SimpleNamespace(journal=journal, has_started=True, can_go_elsewhere=True)
    unused = cast(Any, None)
    job = Job(cast(Any, exchange), unused, unused, unused, b"", 0.0, 0)
    tried(job, "a", "1")
    job.count_move("a")
    tried(job, "b", "1")
    journal.keep(b"[0,[6],null,0]\n")
    assert not job.count_failure("b", UpstreamBrokenError("", "broken"))


@pytest.mark.parametrize("is_late", [False, True])
def test_who_refuses_to_prefill_what_another_answers_is_to_blame_once(is_late: bool) -> None:
    blamed: list[tuple[str, bool]] = []
    limits = SimpleNamespace(answered=lambda url, *, is_error: blamed.append((url, is_error)))
    unused = cast(Any, None)
    job = Job(unused, cast(Any, SimpleNamespace(in_flight_limits=limits)), unused, unused, b"", 0.0, 1)
    if is_late:
        job.note_answer()
    job.note_refusal("a")
    assert blamed == ([("a", True)] if is_late else []), "whoever asked nonsense is refused everywhere"
    job.note_answer()
    job.note_answer()
    assert blamed == [("a", True)]


def tried(job: Job, url: str, revision: str) -> None:
    endpoint = an_endpoint(url, revision=revision)
    job.count_attempt(Placement(leg_on(endpoint, a_request(), {})))
