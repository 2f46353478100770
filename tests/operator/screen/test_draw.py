"""What the screen says of a service, at every width."""

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console
from tests.operator.cluster_objects import service

from kvasir_operator.rollout.workload import Workload, WorkloadKey
from kvasir_operator.screen.draw import NUM_EVENTS, draw, text_of
from kvasir_operator.screen.read import Snapshot

NOW = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
EARLIER = "2026-11-20T09:55:00Z"


def role(name: str, desired: int, ready: int, **fields: Any) -> dict[str, Any]:
    return {"role": name, "desired": desired, "ready": ready, "draining": 0, "message": "", **fields}


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": EARLIER}


def event(reason: str, message: str = "", at: str | None = EARLIER, **fields: Any) -> dict[str, Any]:
    metadata = {"creationTimestamp": "2026-11-20T09:00:00Z"}
    return {"metadata": metadata, "type": "Normal", "reason": reason, "message": message, "lastTimestamp": at, **fields}


STATUS = {
    "observedGeneration": 3,
    "phase": "Updating",
    "url": "http://llama-router.models.svc:8080/v1",
    "ready": "1/2",
    "roles": [
        role("serve", 2, 1, draining=1, revision="5f0c1e2d3a", message="pod llama-a: the engine is loading the model"),
        role("router", 2, 2),
    ],
    "conditions": [
        condition("Ready", "True", "Serving", "1 of 2 replicas serve llama"),
        condition("Progressing", "False", "RolloutPaused", "revision 5f0c1e2d3a gets 10 % of the requests"),
    ],
    "scaling": [
        {"time": EARLIER, "role": "serve", "from": 1, "to": 3, "reason": "KVCacheDemand", "message": "41k tokens"},
        {"time": "2026-11-20T09:59:30Z", "role": "serve", "from": 3, "to": 2, "reason": "LowDemand", "message": "9k"},
    ],
}
WORKLOADS = (
    Workload(WorkloadKey("serve", "0a0a0a0a0a"), number=1, replicas=1, num_ready=1, num_leaving=1),
    Workload(WorkloadKey("serve", "5f0c1e2d3a"), number=2, replicas=1, traffic_weight=10, trouble="no such image"),
)


def snapshot(status: dict[str, Any] | None = None, **fields: Any) -> Snapshot:
    obj = service(status=STATUS if status is None else status)
    model = {"source": "hf://org/llama", "name": "llama-3.1-8b", "aliases": ["gpt-4o-mini"]}
    obj |= {"spec": {"model": model}}
    return Snapshot(obj, **fields)


def lines_of(shown: Snapshot, section: str) -> list[str]:
    """Those of one section, without its title and its columns' headers, each with single spaces."""
    sections = text_of(shown, NOW).split("\n\n")
    [found] = [each for each in sections if each.startswith(section)]
    return [" ".join(line.split()) for line in found.splitlines()[2:]]


def test_the_header_says_what_is_served_where_and_how_far_it_is() -> None:
    header = text_of(snapshot(), NOW).split("\n\n")[0]
    assert [" ".join(line.split()) for line in header.splitlines()] == [
        "service models/llama",
        "model llama-3.1-8b, gpt-4o-mini (hf://org/llama)",
        "url http://llama-router.models.svc:8080/v1",
        "phase Updating",
        "ready 1/2",
        "spec generation 3",
    ]


def test_roles_say_what_they_have_and_wait_for() -> None:
    assert lines_of(snapshot(), "ROLES") == [
        "serve 2 1 1 5f0c1e2d3a pod llama-a: the engine is loading the model",
        "router 2 2 0",
    ]


def test_revisions_come_the_current_one_first_with_a_canarys_share_and_trouble() -> None:
    assert lines_of(snapshot(workloads=WORKLOADS), "REVISIONS") == [
        "serve 5f0c1e2d3a 2 1 0 0 10 % no such image",
        "serve 0a0a0a0a0a 1 1 1 1",
    ]


def test_conditions_and_decisions_have_reason_age_and_message() -> None:
    assert lines_of(snapshot(), "CONDITIONS") == [
        "Ready True Serving 5m0s 1 of 2 replicas serve llama",
        "Progressing False RolloutPaused 5m0s revision 5f0c1e2d3a gets 10 % of the requests",
    ]
    assert lines_of(snapshot(), "SCALING") == [
        "30s serve 3 to 2 LowDemand 9k",
        "5m0s serve 1 to 3 KVCacheDemand 41k tokens",
    ]


def test_the_newest_events_are_shown_and_how_often_each_was_seen() -> None:
    events = [event(f"Reason{number}", at=f"2026-11-20T09:{number:02}:00Z") for number in range(NUM_EVENTS + 1)]
    shown = lines_of(snapshot(events=(*events, event("Now", "it is", at=NOW.isoformat(), count=7))), "EVENTS")
    assert shown[0] == "0s 7 Normal Now it is"
    assert [line.split()[3] for line in shown[1:]] == [f"Reason{number}" for number in range(NUM_EVENTS, 1, -1)]


def test_an_event_without_a_last_time_has_that_of_its_making() -> None:
    assert lines_of(snapshot(events=(event("Seen", at=None),)), "EVENTS") == ["60m 1 Normal Seen"]


def test_a_service_that_no_operator_has_seen_says_so_and_has_no_empty_sections() -> None:
    text = text_of(snapshot({}), NOW)
    assert "generation 3: no operator has reported yet; does one run, and serve this namespace?" in text
    assert "\n\n" not in text


def test_a_status_of_an_older_spec_says_so() -> None:
    text = text_of(snapshot({**STATUS, "observedGeneration": 2}), NOW)
    assert "generation 3; all below is of generation 2" in text


def test_what_could_not_be_read_is_said() -> None:
    assert "note     Events are not shown: events is forbidden" in text_of(
        snapshot(notes=("Events are not shown: events is forbidden",)), NOW
    )


def test_a_model_is_named_as_its_service_where_the_spec_names_none() -> None:
    obj = service() | {"spec": {"model": {"source": "file:///m"}}}
    assert "model    llama (file:///m)" in text_of(Snapshot(obj), NOW)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_screen_and_no_word_of_a_message_is_lost(width: int) -> None:
    text = text_of(snapshot(workloads=WORKLOADS, events=(event("Created", "a " + "long " * 40),)), NOW, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("long") == 40
    assert "pod llama-a: the engine is loading the model" in " ".join(text.split()) or width == 40


def test_without_a_width_each_row_is_a_line() -> None:
    assert lines_of(snapshot(events=(event("Created", "word " * 300),)), "EVENTS") == [
        ("5m0s 1 Normal Created " + "word " * 300).strip()
    ]


@pytest.mark.parametrize("words", ["\x1b[31mred\x1b[0m", "two\nlines", "a\rb", "\x9b2J", "back\u202ewards"])
def test_what_others_write_cannot_command_the_terminal(words: str) -> None:
    shown = snapshot(events=(event("Odd", words),))
    file_text = _on_terminal(shown)
    assert words not in file_text
    assert "\x1b[31mred" not in file_text
    assert len(lines_of(shown, "EVENTS")) == 1


def test_brackets_are_words_and_no_markup() -> None:
    assert lines_of(snapshot(events=(event("Odd", "[bold]a[/bold] [/nothing]"),)), "EVENTS") == [
        "5m0s 1 Normal Odd [bold]a[/bold] [/nothing]"
    ]


def test_trouble_is_red_on_a_terminal_and_plain_without_one() -> None:
    degraded = snapshot({**STATUS, "conditions": [condition("Degraded", "True", "CrashLooping", "it ends")]})
    assert "\x1b[1;31mDegraded" in _on_terminal(degraded)
    assert "\x1b" not in text_of(degraded, NOW)


def _on_terminal(shown: Snapshot) -> str:
    console = Console(width=100, force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})
    with console.capture() as capture:
        console.print(draw(shown, NOW))
    return capture.get()
