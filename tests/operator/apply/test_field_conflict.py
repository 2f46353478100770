"""Who keeps writing fields back, and how long each further attempt waits."""

from typing import Any

import pytest
from tests.operator.cluster_objects import child, stored

from kvasir_operator.apply.foreign_writes import FieldConflict, conflict_message, continued, writers_of

SCALER = {"f:spec": {"f:replicas": {}}}
IMAGES = {
    "f:spec": {"f:template": {"f:spec": {"f:containers": {'k:{"name":"engine"}': {".": {}, "f:image": {}}}}}},
}
PORTS = {"f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:targetPort": {}}}}}
SUBJECTS = {"f:subjects": {}}


def owned(**fields_by_manager: dict[str, Any]) -> dict[str, Any]:
    entries = [{"manager": name, "fieldsV1": fields} for name, fields in fields_by_manager.items()]
    return stored(child("Deployment"), managedFields=entries)


@pytest.mark.parametrize(
    ("path", "writers"),
    [
        ("spec.replicas", ["scaler"]),
        ("spec.template.spec.containers[engine].image", ["mirror"]),
        ("spec.template.spec.containers[engine]", ["mirror"]),
        ("spec.template.spec.containers[other].image", []),
        ("spec.ports[80,TCP].targetPort", ["mesh"]),
        ("subjects[0].name", ["admin"]),
        ("spec.paused", []),
    ],
)
def test_the_writers_of_a_field_are_read_from_who_owns_it(path: str, writers: list[str]) -> None:
    live = owned(scaler=SCALER, mirror=IMAGES, mesh=PORTS, admin=SUBJECTS, **{"kvasir-operator": SCALER | SUBJECTS})
    assert writers_of(live, path) == writers


def test_the_message_names_the_writers_and_the_fields() -> None:
    message = conflict_message(owned(scaler=SCALER), ["spec.replicas"])
    assert message.startswith("scaler keeps writing spec.replicas: ")


def test_a_writer_that_nobody_can_name_is_somebody() -> None:
    assert conflict_message(owned(), ["spec.replicas"]).startswith("somebody keeps writing")


def contest_after(*moments: float) -> FieldConflict:
    conflict: FieldConflict | None = None
    for moment in moments:
        conflict = continued(conflict, "m", moment)
    assert conflict is not None
    return conflict


def test_each_edit_that_follows_soon_waits_twice_as_long_up_to_a_bound() -> None:
    moments, waits = [0.0], []
    for _ in range(11):
        conflict = contest_after(*moments)
        waits.append(conflict.next_write - moments[-1])
        moments.append(conflict.next_write)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]


def test_an_edit_after_a_quiet_while_is_the_first_again() -> None:
    second = contest_after(0.0, 1.0)  # may be undone again from 3 s on, and is over a minute later
    assert continued(second, "m", 62.9).num_edits == 3
    assert continued(second, "m", 63.0).num_edits == 1


def test_only_a_third_edit_in_a_row_is_reported() -> None:
    assert [contest_after(*range(n)).is_reported for n in (1, 2, 3)] == [False, False, True]
