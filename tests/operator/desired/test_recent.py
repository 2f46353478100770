"""When a service is rendered anew, and when what was rendered a moment ago holds."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.objects import MAX_SERVICES, DesiredService, RecentlyDesired, desired_service
from kvasir_operator.errors import InvalidManifestError
from kvasir_operator.settings import OperatorSettings


@pytest.fixture
def rendered(make_service: Callable[..., InferenceService]) -> DesiredService:
    return desired_service(make_service(), OperatorSettings())


class Counting:
    """Renders the same of whatever it is asked for, and counts how often it did."""

    def __init__(self, rendered: DesiredService) -> None:
        self.recent = RecentlyDesired()
        self.num_rendered = 0
        self._rendered = rendered

    def ask(self, manifest: dict[str, Any], *inputs: object) -> DesiredService:
        return self.recent.of(manifest, inputs, self._render)

    def _render(self) -> DesiredService:
        self.num_rendered += 1
        return self._rendered


def manifest(name: str = "llama", spec: str = "a", **metadata: Any) -> dict[str, Any]:
    """As another read of the API server would give it: equal, and not the same."""
    return {
        "metadata": {"name": name, "namespace": "models", "uid": "u", **metadata},
        "spec": {"model": {"name": spec}},
    }


def test_what_was_rendered_of_an_equal_manifest_holds(rendered: DesiredService) -> None:
    counting = Counting(rendered)
    found = [counting.ask(manifest(resourceVersion=version), 1) for version in ("1", "2")]
    assert (counting.num_rendered, found) == (1, [rendered, rendered])


@pytest.mark.parametrize(
    ("changed", "inputs"),
    [
        (manifest(spec="b"), [1]),
        (manifest(uid="of a namesake"), [1]),
        (manifest(generation=2), [1]),
        (manifest(labels={"a": "b"}), [1]),
        (manifest(annotations={"a": "b"}), [1]),
        (manifest(), [2]),
    ],
    ids=["spec", "uid", "generation", "labels", "annotations", "inputs"],
)
def test_a_change_is_rendered(rendered: DesiredService, changed: dict[str, Any], inputs: list[int]) -> None:
    counting = Counting(rendered)
    counting.ask(manifest(), 1)
    counting.ask(changed, *inputs)
    assert counting.num_rendered == 2


def test_a_manifest_that_does_not_hold_is_told_of_each_time(rendered: DesiredService) -> None:
    def refuse() -> DesiredService:
        raise InvalidManifestError("spec", "wrong")

    counting = Counting(rendered)
    for _ in range(2):
        with pytest.raises(InvalidManifestError):
            counting.recent.of(manifest(), (), refuse)
    assert counting.ask(manifest()) is rendered


def test_of_many_services_those_asked_for_last_are_kept(rendered: DesiredService) -> None:
    counting = Counting(rendered)
    names = [str(number) for number in range(MAX_SERVICES)]
    for name in [*names, names[0], "one more"]:
        counting.ask(manifest(name))
    assert counting.num_rendered == MAX_SERVICES + 1
    counting.ask(manifest(names[0]))
    assert counting.num_rendered == MAX_SERVICES + 1
    counting.ask(manifest(names[1]))
    assert counting.num_rendered == MAX_SERVICES + 2
