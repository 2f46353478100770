"""Whose a model name is behind the gateway, and who hears that it may have become his."""

from typing import Any

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.observe.model_names import ModelNames, claimed_names

FIRST, SECOND = "2026-11-20T10:00:00Z", "2026-11-20T10:00:01Z"
A, B, C = (ServiceKey("models", name) for name in "abc")


def service(
    name: str, *names: str, created: str = FIRST, version: int = 1, mode: str = "gateway", namespace: str = "models"
) -> dict[str, Any]:
    """Of a model `names[0]`, with the rest as aliases."""
    metadata = {"namespace": namespace, "name": name, "creationTimestamp": created, "resourceVersion": str(version)}
    model = {"source": "pvc://m", "name": names[0], "aliases": list(names[1:])} if names else {"source": "pvc://m"}
    return {"metadata": metadata, "spec": {"model": model, "router": {"mode": mode}}}


def known(*services: dict[str, Any]) -> ModelNames:
    names = ModelNames()
    for each in services:
        names.put(each)
    return names


def test_the_names_are_the_models_its_aliases_and_its_adapters() -> None:
    obj = service("a", "big", "b")
    obj["spec"]["engine"] = {"adapters": {"list": [{"name": "sql", "source": "pvc://m"}, {"name": "b"}]}}
    assert claimed_names(obj) == ("big", "b", "sql")
    assert claimed_names(service("a")) == ("a",)


def test_a_service_with_a_router_of_its_own_claims_nothing() -> None:
    assert claimed_names(service("a", mode="dedicated")) == ()
    assert claimed_names({"metadata": {"name": "a"}, "spec": {"model": {"source": "pvc://m"}}}) == ()


def test_a_name_belongs_to_the_service_that_was_created_first() -> None:
    names = known(service("a", "big", "x", created=SECOND), service("b", "big", created=FIRST))
    assert names.taken(A) == {"big": B}
    assert names.taken(B) == {}


def test_of_one_second_the_first_by_namespace_and_name_has_it() -> None:
    elsewhere = ServiceKey("another", "z")
    names = known(service("a", "big"), service("b", "big"), service("z", "big", namespace="another"))
    assert names.taken(A) == names.taken(B) == {"big": elsewhere}
    assert names.taken(elsewhere) == {}


def test_each_name_is_looked_at_by_itself() -> None:
    names = known(
        service("a", "x", created=FIRST), service("b", "x", "y", created=SECOND), service("c", "y", created=SECOND)
    )
    assert names.taken(B) == {"x": A}
    assert names.taken(C) == {"y": B}


def test_who_waits_for_a_name_hears_that_its_owner_goes_or_lets_go_of_it() -> None:
    waiting = service("b", "big", created=SECOND)
    deleted, renamed, moved = (known(service("a", "big"), waiting) for _ in range(3))
    assert deleted.remove(A) == {B}
    assert renamed.put(service("a", "other", version=2)) == {B}
    assert moved.put(service("a", "big", version=2, mode="dedicated")) == {B}
    assert deleted.taken(B) == renamed.taken(B) == moved.taken(B) == {}


def test_who_has_a_name_hears_that_an_older_service_wants_it() -> None:
    names = known(service("b", "big", created=SECOND), service("a", "small"))
    assert names.put(service("a", "small", "big", version=2)) == {B}
    assert names.taken(B) == {"big": A}


def test_a_change_of_anything_else_concerns_nobody() -> None:
    names = known(service("a", "big"), service("b", "big"))
    assert names.put(service("a", "big", version=2)) == set()
    assert names.remove(C) == set()


def test_a_service_that_was_made_anew_is_as_old_as_it_is_now() -> None:
    names = known(service("a", "big", created=FIRST), service("b", "big", created=SECOND))
    assert names.put(service("a", "big", created="2026-11-20T11:00:00Z", version=9)) == {B}
    assert names.taken(A) == {"big": B}


def test_everybody_behind_the_gateway_is_known() -> None:
    names = known(service("a", "x", "y"), service("b", "x"), service("c", mode="dedicated"))
    assert names.claimants() == {A, B}
