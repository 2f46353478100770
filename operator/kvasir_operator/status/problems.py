"""What a pass found beside its pods that a person should know of, each with the reason that its conditions show."""

from collections.abc import Iterable

from kvasir_operator.api.conditions import Reason
from kvasir_operator.apply.apply import Refusal
from kvasir_operator.desired.unsupported import UnsupportedFeature
from kvasir_operator.kube.kinds import ObjectKey
from kvasir_operator.observe.waiting import Waiting

_TAKEN = "exists and belongs to somebody else: delete or rename it, or rename the service"


def find_problems(
    unsupported: Iterable[UnsupportedFeature],
    refusals: Iterable[Refusal],
    taken: Iterable[ObjectKey],
    contested: Iterable[str],
) -> list[Waiting]:
    """`taken`: children whose name somebody else's object has. `contested`: who keeps writing which fields back."""
    return [
        *(Waiting(Reason.UNSUPPORTED_FEATURE, str(feature)) for feature in unsupported),
        *(Waiting(each.reason, f"{each.key}: {each.error}") for each in refusals),
        *(Waiting(Reason.NAME_TAKEN, f"{key} {_TAKEN}") for key in taken),
        *(Waiting(Reason.FIELDS_CONTESTED, message) for message in contested),
    ]
