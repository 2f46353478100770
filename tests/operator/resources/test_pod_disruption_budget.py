"""Node drains take one pod of a role at a time, and are never blocked by a role of one pod."""

from collections.abc import Callable

from kvasir_operator.api.defaults import InstallationDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import Role, engine_roles, router_roles
from kvasir_operator.resources.pod_disruption_budget import pod_disruption_budget

MakeService = Callable[..., InferenceService]


def roles_of(service: InferenceService) -> list[Role]:
    defaults = InstallationDefaults()
    return [*engine_roles(service, defaults), *router_roles(service, defaults)]


def budgets(service: InferenceService) -> dict[str, bool]:
    """Whether there is one, by role."""
    found = {role.name: pod_disruption_budget(service, role) for role in roles_of(service)}
    return {name: budget is not None for name, budget in found.items()}


def test_a_role_of_two_pods_has_a_budget_and_one_of_one_has_none(make_service: MakeService) -> None:
    assert budgets(make_service(replicas=2, router={"replicas": 1})) == {"serve": True, "router": False}
    assert budgets(make_service(replicas=1, router={"replicas": 2})) == {"serve": False, "router": True}
    assert budgets(make_service(suspend=True)) == {"serve": False, "router": False}


def test_roles_of_a_split_service_have_budgets_of_their_own(make_service: MakeService) -> None:
    service = make_service(disaggregation={"prefill": {"replicas": 2}, "decode": {"replicas": 3}})
    made = [pod_disruption_budget(service, role) for role in roles_of(service)]
    found = {budget["metadata"]["name"]: budget["spec"] for budget in made if budget is not None}

    assert set(found) == {"llama-prefill", "llama-decode", "llama-router"}
    assert found["llama-decode"]["selector"] == {
        "matchLabels": {"serving.kvasir.dev/service": "llama", "serving.kvasir.dev/role": "decode"}
    }
    assert {spec["maxUnavailable"] for spec in found.values()} == {1}


def test_of_many_pods_a_tenth_may_go_at_once_but_not_of_groups(make_service: MakeService) -> None:
    for spec, expected in ({}, "10%"), ({"parallelism": {"pipeline": 2}}, 1):
        [role, _] = roles_of(make_service(replicas=11, **spec))
        budget = pod_disruption_budget(make_service(replicas=11, **spec), role)
        assert budget is not None
        assert budget["spec"]["maxUnavailable"] == expected
