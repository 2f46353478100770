"""What a pass found beside its pods that a person should know of, each with the reason that its conditions show."""

from collections.abc import Iterable, Iterator

from kvasir_operator.api.conditions import Reason
from kvasir_operator.apply.apply import Refusal
from kvasir_operator.desired.unsupported import UnsupportedFeature
from kvasir_operator.kube.kinds import ObjectKey
from kvasir_operator.observe.model_names import GatewayState
from kvasir_operator.observe.waiting import Waiting

_TAKEN = "exists and belongs to somebody else: delete or rename it, or rename the service"


def find_problems(
    unsupported: Iterable[UnsupportedFeature],
    refusals: Iterable[Refusal],
    taken: Iterable[ObjectKey],
    contested: Iterable[str],
    gateway: GatewayState | None = None,
    of_groups: Iterable[Waiting] = (),
) -> list[Waiting]:
    """`taken`: children whose name somebody else's object has. `contested`: who keeps writing which fields back.

    `gateway`: None for a service that is not behind one. `of_groups`: what ails replicas of several pods.
    """
    return [
        *(Waiting(Reason.UNSUPPORTED_FEATURE, str(feature)) for feature in unsupported),
        *(Waiting(each.reason, each.message) for each in refusals),
        *(Waiting(Reason.NAME_TAKEN, f"{key} {_TAKEN}") for key in taken),
        *(Waiting(Reason.FIELDS_CONTESTED, message) for message in contested),
        *(() if gateway is None else _of_gateway(gateway)),
        *of_groups,
    ]


def _of_gateway(gateway: GatewayState) -> Iterator[Waiting]:
    if not gateway.is_ready:
        yield Waiting(Reason.GATEWAY_NOT_READY, "no pod of the gateway is ready")
    if gateway.taken:
        yield Waiting(Reason.MODEL_NAME_TAKEN, _taken_names(gateway))


def _taken_names(gateway: GatewayState) -> str:
    """Which names of the service another one has, and what to do."""
    taken = ", ".join(f"{name!r} belongs to service {owner}" for name, owner in gateway.taken.items())
    return f"behind the gateway {taken}, which was created first: choose another name or alias, or rename that one's"
