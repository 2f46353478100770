"""Which services a pass need not ask for."""

from typing import Any

from tests.operator.cluster_objects import service

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.observe.seen_services import LOOK_SECONDS, SeenServices

KEY = ServiceKey("models", "llama")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def state(version: int, **fields: Any) -> dict[str, Any]:
    obj = service()
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}, **fields}


def version(seen: SeenServices) -> str | None:
    found = seen.of(KEY)
    return None if found is None else str(found["metadata"]["resourceVersion"])


def test_what_was_shown_is_known_without_who_set_which_field() -> None:
    seen, obj = SeenServices(Clock()), state(5, spec={"model": {}})
    seen.watch("ADDED", {**obj, "metadata": {**obj["metadata"], "managedFields": [{"manager": "kubectl"}]}})
    assert seen.of(KEY) == obj
    assert seen.of(ServiceKey("models", "mistral")) is None


def test_what_a_pass_does_to_it_is_its_own_affair() -> None:
    seen = SeenServices(Clock())
    seen.watch(None, state(5))
    (seen.of(KEY) or {})["status"] = {"phase": "Ready"}
    assert seen.of(KEY) == state(5)


def test_only_a_newer_state_takes_its_place() -> None:
    seen = SeenServices(Clock())
    seen.watch("MODIFIED", state(5))
    for new, known in ((4, "5"), (5, "5"), (6, "6")):
        seen.put(state(new))
        assert version(seen) == known
    seen.watch("MODIFIED", state(5))
    assert version(seen) == "6"


def test_one_that_was_deleted_is_asked_for_though_the_answer_to_an_earlier_write_comes_late() -> None:
    seen = SeenServices(Clock())
    seen.watch("ADDED", state(5))
    seen.watch("DELETED", state(7))
    assert version(seen) is None
    seen.put(state(6))
    assert version(seen) is None
    seen.watch("ADDED", state(8))
    assert version(seen) == "8"


def test_one_that_was_not_shown_for_a_while_is_asked_for() -> None:
    clock = Clock()
    seen = SeenServices(clock)
    seen.watch("ADDED", state(5))
    clock.now += LOOK_SECONDS - 1
    assert version(seen) == "5"
    clock.now += 1
    assert version(seen) is None


def test_an_older_state_is_known_after_a_while_as_a_restored_backup_has_it() -> None:
    clock = Clock()
    seen = SeenServices(clock)
    seen.watch("ADDED", state(5))
    clock.now += LOOK_SECONDS
    seen.watch(None, state(2))
    assert version(seen) == "2"


def test_each_time_that_it_is_shown_counts_and_others_go() -> None:
    clock = Clock()
    seen = SeenServices(clock)
    seen.watch("ADDED", service("mistral"))
    for number in range(3):
        seen.watch("MODIFIED", state(5 + number))
        clock.now += LOOK_SECONDS - 1
    assert version(seen) == "7"
    assert len(seen) == 1


def test_what_no_longer_holds_is_asked_for() -> None:
    seen = SeenServices(Clock())
    seen.watch("ADDED", state(5))
    seen.forget(KEY)
    seen.forget(KEY)
    assert version(seen) is None
