"""The status of an InferenceService, as the API server stores it: one dataclass a group, as api/model.py has the spec.

Its schema is generated from these classes too; status/ fills them in.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from kvasir_operator.api.fields import Format, Items, Key, Pattern

Timestamp = Annotated[str, Format("date-time")]
Phase = Literal["Pending", "Loading", "Ready", "Scaling", "Updating", "Degraded", "Idle", "Suspended"]


@dataclass(frozen=True)
class RoleStatus:
    """Replicas of one role: pods, or groups of them."""

    role: Literal["serve", "prefill", "decode", "router"]
    """What the pods do."""
    desired: int
    """Replicas wanted, over all revisions."""
    ready: int
    """Those that take requests."""
    draining: int
    """Those that finish their requests and go."""
    message: str
    """What they wait for."""
    revision: str | None = None
    """Revision that they are brought to."""


@dataclass(frozen=True)
class ConditionStatus:
    """One condition, as Kubernetes' own kinds have them."""

    type: Annotated[str, Pattern(None, 316)]
    """Ready, ModelLoaded, Routable, Progressing, Degraded or, of an autoscaled service, ScalingActive."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Pattern(None, 1024)]
    """Why, in one word of a fixed list."""
    message: Annotated[str, Pattern(None, 32768)]
    """Why, in a sentence."""
    last_transition_time: Timestamp
    """When status last changed."""
    observed_generation: int | None = None
    """Generation of the spec that it is about."""


@dataclass(frozen=True)
class ScalingDecision:
    """One change of a role's replicas."""

    time: Timestamp
    """When it was made."""
    role: str
    """Whose replicas."""
    from_replicas: Annotated[int, Key("from")]
    """Replicas before."""
    to_replicas: Annotated[int, Key("to")]
    """Replicas after."""
    reason: str
    """Why, in one word."""
    message: str
    """Why, in a sentence."""


@dataclass(frozen=True)
class ServiceStatus:
    """What is observed."""

    observed_generation: int | None = None
    """Generation of the spec that this status is about."""
    phase: Phase | None = None
    """One word for it all; the conditions say why."""
    url: str | None = None
    """OpenAI base URL inside the cluster."""
    ready: str | None = None
    """Ready of wanted engine replicas, such as 2/2."""
    replicas: int | None = None
    """Engine replicas that exist, for the scale subresource."""
    selector: str | None = None
    """Label selector of the engine pods that take requests, for the scale subresource."""
    roles: Annotated[tuple[RoleStatus, ...], Items(4, unique_by="role")] = ()
    """Pods by role."""
    conditions: Annotated[tuple[ConditionStatus, ...], Items(16, unique_by="type")] = ()
    """Ready: a request is served now, or after the wake that it causes. Progressing: pods are being brought to what the
    spec says."""
    scaling: Annotated[tuple[ScalingDecision, ...], Items(10)] = ()
    """The last ten scaling decisions."""
