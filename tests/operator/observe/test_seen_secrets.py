"""Which Secrets a pass need not ask for."""

from typing import Any

from tests.operator.cluster_objects import NOW, child, owner, stored

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.observe.seen_secrets import LOOK_SECONDS, SeenSecrets

KEY = ServiceKey("models", "llama")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def secret(**metadata: Any) -> dict[str, Any]:
    return stored(child("Secret", "llama-router", data={"value": "c2VjcmV0"}), **metadata)


def known_after(*observed: dict[str, Any], uid: str = "uid-1") -> list[dict[str, Any]]:
    seen = SeenSecrets(Clock())
    seen.remember(KEY, uid, observed)
    return seen.of(KEY, uid)


def test_one_that_was_seen_is_known_without_what_it_holds() -> None:
    [known] = known_after(secret(managedFields=[{"manager": "kvasir-operator"}]))
    assert known == {key: value for key, value in secret().items() if key != "data"}


def test_other_children_are_not_kept() -> None:
    assert known_after(stored(child())) == []


def test_one_that_is_about_to_go_is_asked_for_each_time() -> None:
    assert known_after(secret(deletionTimestamp=NOW)) == []
    assert known_after(secret(), uid="uid-of-a-successor") == []
    assert known_after(secret(ownerReferences=[{**owner(), "controller": False}])) == []


def test_it_is_asked_for_again_after_a_while_however_often_it_was_not() -> None:
    clock = Clock()
    seen = SeenSecrets(clock)
    seen.remember(KEY, "uid-1", [secret()])
    for seconds in (LOOK_SECONDS / 2, LOOK_SECONDS / 2 - 1):
        clock.now += seconds
        assert len(seen.of(KEY, "uid-1")) == 1
        seen.remember(KEY, "uid-1", seen.of(KEY, "uid-1"))
    clock.now += 1
    assert seen.of(KEY, "uid-1") == []


def test_one_that_is_made_after_the_first_pass_is_known_from_the_next_on() -> None:
    seen = SeenSecrets(Clock())
    seen.remember(KEY, "uid-1", [])
    seen.remember(KEY, "uid-1", [secret()])
    assert len(seen.of(KEY, "uid-1")) == 1


def test_one_that_was_not_found_is_known_no_more() -> None:
    seen = SeenSecrets(Clock())
    seen.remember(KEY, "uid-1", [secret()])
    seen.remember(KEY, "uid-1", [])
    assert seen.of(KEY, "uid-1") == []


def test_a_namesakes_is_not_the_services_own() -> None:
    seen = SeenSecrets(Clock())
    seen.remember(KEY, "uid-1", [secret()])
    assert seen.of(KEY, "uid-of-a-successor") == []


def test_of_a_service_that_is_gone_nothing_is_known() -> None:
    seen = SeenSecrets(Clock())
    seen.remember(KEY, "uid-1", [secret()])
    seen.forget(KEY)
    assert seen.of(KEY, "uid-1") == []
