"""The roles of a service: how many pods, and whose settings hold for them."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults, RouterDefaults
from kvasir_operator.api.model import InferenceService, PodSpec, ResourcesSpec, RouterResources
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.desired.roles import EngineRole, Role, engine_roles, router_role, router_roles
from kvasir_operator.errors import InvalidManifestError, UnknownProfileError

MakeService = Callable[..., InferenceService]
NO_DEFAULTS = InstallationDefaults()
SPLIT = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [
        ({}, {"serve": 1, "router": 2}),
        ({"replicas": 0}, {"serve": 0, "router": 2}),
        ({"replicas": 5, "router": {"replicas": 1}}, {"serve": 5, "router": 1}),
        ({"router": {"replicas": 0}}, {"serve": 1, "router": 0}),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 8}}, {"serve": 3, "router": 2}),
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 8}}, {"serve": 1, "router": 2}),
        ({"disaggregation": SPLIT}, {"prefill": 2, "decode": 3, "router": 2}),
        ({"disaggregation": {"prefill": {}, "decode": {}}}, {"prefill": 1, "decode": 1, "router": 2}),
        ({"replicas": 5, "suspend": True}, {"serve": 0, "router": 0}),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 8}, "suspend": True}, {"serve": 0, "router": 0}),
        ({"disaggregation": SPLIT, "suspend": True}, {"prefill": 0, "decode": 0, "router": 0}),
        ({"replicas": 5, "router": {"mode": "gateway"}}, {"serve": 5}),
    ],
)
def test_each_role_wants_its_own_number_of_pods(
    make_service: MakeService, spec: dict[str, Any], replicas: dict[str, int]
) -> None:
    service = make_service(**spec)
    roles: list[Role] = [*engine_roles(service, NO_DEFAULTS), *router_roles(service, NO_DEFAULTS)]
    assert {role.name: role.replicas for role in roles} == replicas


@pytest.mark.parametrize(
    ("scaled", "replicas"),
    [({}, 2), ({"serve": 1}, 2), ({"serve": 5}, 5), ({"serve": 9}, 8), ({"serve": 0}, 2), ({"decode": 5}, 2)],
)
def test_an_autoscaled_role_wants_what_was_decided_within_its_bounds(
    make_service: MakeService, scaled: dict[str, int], replicas: int
) -> None:
    service = make_service(autoscaling={"minReplicas": 2, "maxReplicas": 8})
    assert [role.replicas for role in engine_roles(service, NO_DEFAULTS, scaled)] == [replicas]


def test_what_was_decided_may_be_zero_and_is_nothing_to_a_role_that_is_not_scaled(make_service: MakeService) -> None:
    split = {"prefill": {"autoscaling": {"minReplicas": 0, "maxReplicas": 8}}, "decode": {"replicas": 3}}
    scaled = engine_roles(make_service(disaggregation=split), NO_DEFAULTS, {"prefill": 0, "decode": 7})
    assert [role.replicas for role in scaled] == [0, 3]


def decode_of(service: InferenceService, defaults: InstallationDefaults = NO_DEFAULTS) -> EngineRole:
    """Serve, of a service that is not split."""
    return engine_roles(service, defaults)[-1]


def test_a_roles_engine_settings_win_over_the_services_and_its_arguments_come_after(make_service: MakeService) -> None:
    decode = {"engine": {"maxNumSeqs": 8, "args": ["--b"]}}
    engine = {"maxNumSeqs": 4, "scheduling": "fcfs", "args": ["--a"]}
    role = decode_of(make_service(engine=engine, disaggregation={"prefill": {}, "decode": decode}))

    assert (role.engine.max_num_seqs, role.engine.scheduling, role.engine.args) == (8, "fcfs", ("--a", "--b"))


DEFAULTS = InstallationDefaults(
    engine=PodDefaults(PodSpec(labels={"of": "all"}, image="all:1"), ResourcesSpec(cpu=Quantity("4"))),
    router=RouterDefaults(PodSpec(image="router:1"), RouterResources(cpu=Quantity("3"), memory=Quantity("2Gi"))),
    profiles={"h100": PodDefaults(PodSpec(image="h100:1"), ResourcesSpec(memory=Quantity("90Gi")))},
)
PROFILE = {"profile": "h100"}


@pytest.mark.parametrize(
    ("spec", "image", "memory"),
    [
        ({}, "all:1", None),
        ({"resources": PROFILE}, "h100:1", "90Gi"),
        ({"resources": {**PROFILE, "memory": "8Gi"}}, "h100:1", "8Gi"),
        ({"resources": PROFILE, "pod": {"image": "mine:1"}}, "mine:1", "90Gi"),
        ({"pod": {"image": "mine:1"}}, "mine:1", None),
        ({"disaggregation": {"prefill": {}, "decode": {"resources": PROFILE}}}, "h100:1", "90Gi"),
        ({"disaggregation": {"prefill": {"resources": PROFILE}, "decode": {}}}, "all:1", None),
        (
            {"pod": {"image": "a:1"}, "disaggregation": {"prefill": {}, "decode": {"pod": {"image": "b:1"}}}},
            "b:1",
            None,
        ),
        ({"pod": {"image": "a:1"}, "disaggregation": {"prefill": {}, "decode": {}}}, "a:1", None),
    ],
)
def test_the_role_wins_over_the_service_over_the_profile_over_the_defaults(
    make_service: MakeService, spec: dict[str, Any], image: str, memory: str | None
) -> None:
    role = decode_of(make_service(**spec), DEFAULTS)

    assert role.pod.image == image
    assert role.resources.memory == (None if memory is None else Quantity(memory))
    assert (role.pod.labels, role.resources.cpu) == ({"of": "all"}, Quantity("4"))


def test_a_profile_that_the_installation_lacks_is_named_with_those_it_has(make_service: MakeService) -> None:
    with pytest.raises(UnknownProfileError, match=r"spec\.resources\.profile: 'a100': this installation has h100"):
        engine_roles(make_service(resources={"profile": "a100"}), DEFAULTS)


@pytest.mark.parametrize(
    ("parallelism", "most", "expected"),
    [
        ({}, None, (1, 1, 1)),
        ({"tensor": 16}, None, (16, 1, 1)),
        ({"tensor": 7}, 8, (7, 1, 1)),
        ({"tensor": 8}, 8, (8, 1, 1)),
        ({"tensor": 16}, 8, (8, 1, 2)),
        ({"tensor": 2}, 1, (1, 1, 2)),
        ({"tensor": 24, "pipeline": 2}, 8, (8, 1, 6)),
        ({"tensor": 2, "pipeline": 2}, 8, (2, 1, 2)),
        ({"pipeline": 3}, 1, (1, 1, 3)),
        ({"tensor": 2, "data": 4}, 8, (2, 4, 1)),
        ({"tensor": 2, "data": 4}, 7, (2, 2, 2)),
        ({"tensor": 2, "data": 3}, 5, (2, 1, 3)),
        ({"tensor": 2, "data": 2}, None, (2, 2, 1)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, None, (2, 2, 2)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 4, (2, 2, 2)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 3, (2, 1, 4)),
        ({"tensor": 8, "pipeline": 2, "data": 2}, 8, (8, 1, 4)),
        ({"tensor": 16, "pipeline": 2, "data": 2}, 8, (8, 1, 8)),
        ({"data": 3}, 1, (1, 1, 3)),
    ],
)
def test_ranks_beyond_the_devices_of_a_pod_are_other_pods(
    make_service: MakeService, parallelism: dict[str, int], most: int | None, expected: tuple[int, int, int]
) -> None:
    role = decode_of(make_service(parallelism=parallelism, resources={"maxDevices": most}))

    assert (role.tensor_ranks_per_pod, role.copies_per_pod, role.num_nodes) == expected
    assert role.is_grouped == (role.num_nodes > 1)


EIGHT_DEVICES = InstallationDefaults(profiles={"h100": PodDefaults(resources=ResourcesSpec(max_devices=8))})


def test_a_profile_says_how_many_devices_its_nodes_have_and_the_manifest_may_say_fewer(
    make_service: MakeService,
) -> None:
    ranks = {"parallelism": {"tensor": 16}}
    by_profile = make_service(**ranks, resources=PROFILE)
    by_manifest = make_service(**ranks, resources={**PROFILE, "maxDevices": 4})

    assert [decode_of(each, EIGHT_DEVICES).num_nodes for each in (by_profile, by_manifest)] == [2, 4]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"parallelism": {"tensor": 12}, "resources": PROFILE}, "spec"),
        ({"parallelism": {"tensor": 12, "data": 2}, "resources": PROFILE}, "spec"),
        (
            {"disaggregation": {"prefill": {"parallelism": {"tensor": 9}, "resources": PROFILE}, "decode": {}}},
            "spec.disaggregation.prefill",
        ),
        (
            {"disaggregation": {"prefill": {}, "decode": {"parallelism": {"tensor": 9}, "resources": PROFILE}}},
            "spec.disaggregation.decode",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_devices_of_a_profile_are_refused_with_their_number(
    make_service: MakeService, spec: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidManifestError, match=r"it is 8 by this installation's profile") as refused:
        engine_roles(make_service(**spec), EIGHT_DEVICES)
    assert refused.value.field_path == path


FOUR_CPUS = InstallationDefaults(
    engine=PodDefaults(resources=ResourcesSpec(cpu=Quantity("4"))),
    router=RouterDefaults(resources=RouterResources(cpu=Quantity("4"))),
)


def test_more_cpu_of_the_installation_than_a_manifest_allows_is_refused_with_both_amounts(
    make_service: MakeService,
) -> None:
    engine = make_service(resources={"cpuLimit": "3500m"})
    with pytest.raises(InvalidManifestError, match=r"cpu is 4 and cpuLimit 3500m, one of them by this") as refused:
        engine_roles(engine, FOUR_CPUS)
    assert refused.value.field_path == "spec.resources"
    router = make_service(router={"resources": {"cpuLimit": 3}})
    with pytest.raises(InvalidManifestError, match=r"cpu is 4 and cpuLimit 3, one of them by this") as refused:
        router_role(router, FOUR_CPUS)
    assert refused.value.field_path == "spec.router.resources"


def test_a_router_asks_for_no_more_than_its_limit(make_service: MakeService) -> None:
    role = router_role(make_service(router={"resources": {"cpuLimit": "100m"}}), NO_DEFAULTS)
    assert role.cpu.text == "100m"


@pytest.mark.parametrize(
    ("router", "defaults", "expected"),
    [
        ({}, NO_DEFAULTS, ("250m", "512Mi")),
        ({}, DEFAULTS, ("3", "2Gi")),
        ({"resources": {"cpu": 7}}, DEFAULTS, ("7", "2Gi")),
        ({"resources": {"memory": "1Gi"}}, NO_DEFAULTS, ("250m", "1Gi")),
    ],
)
def test_a_router_asks_for_what_the_manifest_else_the_installation_says(
    make_service: MakeService, router: dict[str, Any], defaults: InstallationDefaults, expected: tuple[str, str]
) -> None:
    role = router_role(make_service(router=router), defaults)

    assert (role.cpu.text, role.memory.text) == expected
    assert role.pod.image == defaults.router.pod.image
