"""The revision changes with what shapes an engine pod, and with nothing else."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults
from kvasir_operator.api.model import InferenceService, PodSpec
from kvasir_operator.desired.objects import revision_of
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


def revision(service: InferenceService, settings: OperatorSettings = SETTINGS) -> str:
    return revision_of(service, engine_roles(service, settings.defaults), settings)


def test_is_ten_hex_digits_and_the_same_each_time(make_service: MakeService) -> None:
    found = revision(make_service())
    assert len(found) == 10
    assert int(found, 16) >= 0
    assert revision(make_service()) == found


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 5},
        {"router": {"policy": "roundRobin", "replicas": 3, "pod": {"image": "mine:2"}}},
        {"rollout": {"maxSurge": 2, "historyLimit": 0, "canary": {"weight": 10}}},
        {"rollout": {"drainTimeout": "5m", "drainDelay": "1s"}},
        {"engine": {"dtype": "auto"}},
        {"engine": {"adapters": {"list": [{"name": "sql", "source": "file:///sql"}]}}},
        {"autoscaling": {"maxReplicas": 2}},
        {"monitoring": {"podMonitor": "none"}},
        {"model": {"source": "file:///models/llama", "aliases": ["gpt"]}},
        {"suspend": True},
    ],
    ids=str,
)
def test_stays_when_no_pod_changes(make_service: MakeService, spec: dict[str, Any]) -> None:
    assert revision(make_service(**spec)) == revision(make_service())


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"source": "file:///other"}},
        {"model": {"source": "file:///models/llama", "name": "another"}},
        {"engine": {"dtype": "float16"}},
        {"resources": {"memory": "1Gi"}},
        {"pod": {"image": "mine:2"}},
        {"rollout": {"drainTimeout": "10s"}},
        {"disaggregation": {"prefill": {}, "decode": {"resources": {"cpu": 2}}}},
    ],
    ids=str,
)
def test_changes_with_the_pod(make_service: MakeService, spec: dict[str, Any]) -> None:
    assert revision(make_service(**spec)) != revision(make_service())


WITH_AMOUNT: dict[str, Callable[[str], dict[str, Any]]] = {
    "cpu": lambda amount: {"resources": {"cpu": amount}},
    "memory": lambda amount: {"resources": {"memory": amount}},
    "sharedMemory": lambda amount: {"resources": {"sharedMemory": amount}},
    "extra": lambda amount: {"resources": {"extra": {"hugepages-2Mi": amount}}},
    "cache": lambda amount: {"model": {"source": "hf://org/name", "cache": {"sizeLimit": amount}}},
    "role": lambda amount: {"disaggregation": {"prefill": {}, "decode": {"resources": {"memory": amount}}}},
}


@pytest.mark.parametrize("spec", WITH_AMOUNT.values(), ids=WITH_AMOUNT)
@pytest.mark.parametrize(("amount", "respelt"), [("1Gi", "1024Mi"), ("3", "3000m"), ("0.5", "500m")])
def test_stays_when_an_amount_is_spelt_another_way(
    make_service: MakeService, spec: Callable[[str], dict[str, Any]], amount: str, respelt: str
) -> None:
    found = revision(make_service(**spec(amount)))
    assert revision(make_service(**spec(respelt))) == found
    assert revision(make_service(**spec("7Gi"))) != found


def test_is_what_it_was_before_where_amounts_are_spelt_as_the_api_server_does(make_service: MakeService) -> None:
    resources = {
        "cpu": "1500m",
        "memory": "64Gi",
        "sharedMemory": "8Gi",
        "extra": {"rdma/ib": 1, "ephemeral-storage": "100G"},
    }
    service = make_service(model={"source": "hf://org/name", "cache": {"sizeLimit": "2Ti"}}, resources=resources)
    [role] = engine_roles(service, SETTINGS.defaults)
    templates = {"serve": engine_pod_template(service, role, SETTINGS)}
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    assert revision(service) == hashlib.sha256(text.encode()).hexdigest()[:10]


@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, runtime_image="kvasir-runtime:next"),
        replace(SETTINGS, image_pull_policy="Always"),
        replace(SETTINGS, image_pull_secret=("registry",)),
        replace(SETTINGS, defaults=InstallationDefaults(PodDefaults(PodSpec(node_selector={"gpu": "h100"})))),
    ],
    ids=["runtime image", "pull policy", "pull secret", "pod defaults"],
)
def test_changes_with_the_installation(make_service: MakeService, settings: OperatorSettings) -> None:
    assert revision(make_service(), settings) != revision(make_service())


def test_changes_with_a_profile_of_the_installation(make_service: MakeService) -> None:
    service = make_service(resources={"profile": "h100"})
    before, after = (
        InstallationDefaults(profiles={"h100": PodDefaults(PodSpec(node_selector={"gpu": gpu}))})
        for gpu in ("h100", "h100-nvl")
    )
    assert revision(service, replace(SETTINGS, defaults=before)) != revision(service, replace(SETTINGS, defaults=after))


def test_a_routers_image_is_none_of_the_engines(make_service: MakeService) -> None:
    assert revision(make_service(), replace(SETTINGS, router_image="kvasir-router:next")) == revision(make_service())
