from typing import Any

import pytest
from tests.router.kube_objects import manifest

from kvasir_router.endpoints.inference_services import InferenceService, claims


def read(name: str = "llama", **fields: Any) -> InferenceService:
    found = InferenceService.read(manifest(name, **fields))
    assert found is not None
    return found


def test_reads_what_concerns_the_router() -> None:
    found = read(
        model="llama-3", aliases=("gpt",), adapters=("sql", "chat"), policy="roundRobin", max_queue_size=7,
        max_queue_wait="1m30s500ms",
    )  # fmt: skip
    assert (found.key, found.model, found.aliases, found.adapters) == (
        ("models", "llama"), "llama-3", ("gpt",), ("sql", "chat"),
    )  # fmt: skip
    assert (found.policy, found.max_queue_size, found.max_queue_wait_seconds) == ("roundRobin", 7, 90.5)
    assert found.names == ("llama-3", "gpt", "sql", "chat")


def test_the_model_is_called_as_the_service_unless_it_has_a_name() -> None:
    assert read().model == "llama"


def test_a_service_with_a_router_of_its_own_is_not_the_gateways() -> None:
    assert InferenceService.read(manifest("llama", mode="dedicated")) is None
    assert InferenceService.read({"metadata": {"name": "a"}, "spec": {"model": {}}}) is None


OLD, NEW = "2026-11-21T10:00:00Z", "2026-11-21T10:00:01Z"


@pytest.mark.parametrize(
    ("why", "one", "other", "expected"),
    [
        ("the first", {"name": "b", "created": OLD}, {"name": "a", "created": NEW}, "b"),
        ("at once, by namespace", {"name": "b", "namespace": "x"}, {"name": "a", "namespace": "y"}, "b"),
        ("then by name", {"name": "a"}, {"name": "b"}, "a"),
    ],
)
def test_a_name_that_two_claim_belongs_to(why: str, one: dict[str, Any], other: dict[str, Any], expected: str) -> None:
    services = [read(**fields, aliases=("shared",)) for fields in (one, other)]
    for order in (services, services[::-1]):
        assert claims(order)["shared"][1] == expected, why


def test_who_loses_one_name_keeps_the_others() -> None:
    first, second = read("first", adapters=("sql",)), read("second", created=NEW, aliases=("sql", "extra"))
    owners = claims([second, first])
    assert {name: key[1] for name, key in owners.items()} == {
        "first": "first", "sql": "first", "second": "second", "extra": "second",
    }  # fmt: skip
    assert list(owners) == ["first", "sql", "second", "extra"]


@pytest.mark.parametrize(
    ("disaggregation", "min_tokens"),
    [(None, None), ({}, None), ({"remotePrefillMinTokens": "auto"}, None), ({"remotePrefillMinTokens": 512}, 512)],
)
def test_reads_from_how_many_tokens_on_prefill_is_remote(
    disaggregation: dict[str, Any] | None, min_tokens: int | None
) -> None:
    spec = {} if disaggregation is None else {"disaggregation": disaggregation}
    assert read(**spec).remote_prefill_min_tokens == min_tokens
