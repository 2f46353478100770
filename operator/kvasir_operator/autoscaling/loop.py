"""The autoscaler's loop: at each turn every autoscaled service is measured and decided, and its pass is called for.

It runs in the leader alone. Of services that can answer nobody, because what decodes is at zero, the routers are asked
every second, so that the first request wakes them whatever becomes of Prometheus; those of eight services at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvasir_operator.api.conditions import ConditionType, Reason, find_condition
from kvasir_operator.api.labels import ROLE_ROUTER, SERVICE_LABEL
from kvasir_operator.api.model import AutoscalingSpec, InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.autoscaling.held import Held, gateway_pods, read_held
from kvasir_operator.autoscaling.ledger import (
    MAX_ENTRIES,
    ScalingLedger,
    ServiceScaling,
    entry_of,
    replicas_by_role,
)
from kvasir_operator.autoscaling.pods import (
    is_beginning,
    pod_names,
    ready_seconds,
    seconds_ready,
    startup_seconds,
)
from kvasir_operator.autoscaling.prometheus import Prometheus
from kvasir_operator.autoscaling.read import Reading, RoleKey
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.autoscaling.situation import HoldReason, Memory, RoleSituation, Verdict
from kvasir_operator.autoscaling.together import decide_together
from kvasir_operator.desired.roles import EngineRole, engine_roles
from kvasir_operator.errors import InvalidManifestError, KubeApiError, PrometheusError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, POD, KubeObject, ServiceKey, is_terminating, service_key
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.observe.replicas import of_role
from kvasir_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

ASLEEP_INTERVAL_SECONDS = 1.0
_MOST_AT_ONCE = 8

Measured = tuple[RoleSample | None, tuple[float, ...], str]
"""Sample, former days, and why there is none."""
ReadHeld = Callable[[Iterable[str], str | None], Awaitable[Held | None]]
"""(addresses of routers, the service's name behind a gateway)"""


@dataclass(frozen=True)
class Clock:
    """`unix`: seconds; `text`: the same moment as a status shows it; `pods`: seconds by the clock that times of pods
    are by, the API server's."""

    unix: Callable[[], float]
    text: Callable[[], str]
    pods: Callable[[], float]


@dataclass(frozen=True)
class _Scaled:
    """A service with something to scale. `roles`: all of them."""

    key: ServiceKey
    obj: KubeObject
    service: InferenceService
    roles: Sequence[EngineRole]
    pods: Sequence[KubeObject]

    @property
    def startup_seconds(self) -> dict[RoleKey, float]:
        return {RoleKey(self.key, role.name): startup_seconds(self.pods, role.name) for role in self.roles}


@dataclass(frozen=True)
class _Turn:
    """What the services of one turn have in common. `seconds`: between turns of all services, the shorter of the last
    two times."""

    gateway: Sequence[KubeObject]
    """Its pods, where services are behind it."""
    reading: Reading | None
    """Of Prometheus; None: only routers are asked, and what none answers for is left as it is."""
    seconds: float


class Autoscaler:
    """Remembers, by service and role, what decisions need of the past."""

    def __init__(
        self,
        client: KubeClient,
        prometheus: Prometheus,
        ledger: ScalingLedger,
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        wake: Callable[[ServiceKey], None],
        clock: Clock,
        read_held: ReadHeld = read_held,
    ) -> None:
        """`wake` has a service's pass run."""
        self._client = client
        self._prometheus = prometheus
        self._ledger = ledger
        self._settings = settings
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._read_held = read_held
        self._asleep: dict[ServiceKey, KubeObject] = {}
        self._memories: dict[ServiceKey, dict[str, Memory]] = {}
        self._being_scaled: set[ServiceKey] = set()
        self._turns_at: tuple[float, ...] = ()
        self._at_once = asyncio.Semaphore(_MOST_AT_ONCE)

    async def run(self, interval_seconds: float, asleep_interval_seconds: float = ASLEEP_INTERVAL_SECONDS) -> None:
        """Runs until cancelled."""
        while True:
            # Beside each other: a Prometheus that hangs must not keep a request from waking its service.
            await asyncio.gather(
                self._turn_or_warn(interval_seconds), self._watch_asleep(interval_seconds, asleep_interval_seconds)
            )

    async def _turn_or_warn(self, interval_seconds: float) -> None:
        try:
            await self.turn()
        except KubeApiError as error:
            logger.warning("autoscaling: %s; again in %g s", error, interval_seconds)

    async def _watch_asleep(self, seconds: float, interval_seconds: float) -> None:
        """Returns after `seconds`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            await asyncio.sleep(min(left, interval_seconds))
            await self.turn_asleep()

    async def turn_asleep(self) -> None:
        """Of roles at zero alone, as the last turn has found them; their routers are asked, and nobody else."""
        await self._scale_all(self._asleep, is_whole=False)

    async def turn(self) -> None:
        """Raises KubeApiError when services cannot be listed."""
        self._turns_at = (*self._turns_at[-2:], self._clock.unix())
        services = await self._services()
        for key in set(self._memories) - set(services):
            self._forget(key)
        await self._scale_all(services, is_whole=True)

    async def _scale_all(self, services: Mapping[ServiceKey, KubeObject], *, is_whole: bool) -> None:
        """`is_whole`: whatever is at zero or not, by Prometheus too, which is asked about all of them at once."""
        found = [await self._scaled(key, obj) for key, obj in list(services.items())]
        scaled = [each for each in found if each is not None]
        reading = None
        if is_whole:
            ahead = {role: seconds for each in scaled for role, seconds in each.startup_seconds.items()}
            reading = Reading(self._prometheus, self._settings.namespace, ahead)
        seconds = min((later - earlier for earlier, later in pairwise(self._turns_at)), default=0.0)
        gateway, is_asked = self._settings.defaults.gateway, any(each.service.is_behind_gateway for each in scaled)
        pods = await gateway_pods(self._client, gateway) if gateway is not None and is_asked else ()
        turn = _Turn(pods, reading, seconds)
        await asyncio.gather(*(self._scale(each, turn) for each in scaled))

    async def _services(self) -> dict[ServiceKey, KubeObject]:
        """Those that have something to scale."""
        found = {}
        for namespace in self._settings.namespace or (None,):
            for obj in await self._client.list(INFERENCE_SERVICE, namespace):
                if not is_terminating(obj) and not obj["spec"].get("suspend"):
                    found[service_key(obj)] = obj
        return found

    async def _scaled(self, key: ServiceKey, obj: KubeObject) -> _Scaled | None:
        """None where nothing is to be scaled, or cannot be."""
        roles: list[EngineRole] = []
        with self._trouble_shown(key, obj, roles):
            service = parse_service(obj)
            every = engine_roles(service, self._settings.defaults)
            roles += (role for role in every if role.autoscaling is not None)
            if roles:
                pods = await self._client.list(POD, key.namespace, {SERVICE_LABEL: key.name})
                return _Scaled(key, obj, service, every, pods)
            self._forget(key)
        return None

    async def _scale(self, scaled: _Scaled, turn: _Turn) -> None:
        key, obj = scaled.key, scaled.obj
        if key in self._being_scaled:
            return
        self._being_scaled.add(key)
        roles = [role for role in scaled.roles if role.autoscaling is not None]
        try:
            with self._trouble_shown(key, obj, roles):
                situations = await self._situations(scaled, turn)
                if situations is not None:
                    self._decide(key, obj, situations, {role.name for role in roles})
        finally:
            self._being_scaled.discard(key)

    @contextmanager
    def _trouble_shown(self, key: ServiceKey, obj: KubeObject, roles: Sequence[EngineRole]) -> Iterator[None]:
        """What goes wrong over one service is that one's trouble alone. `roles`: see `_hold`; may be filled within."""
        try:
            yield
        except InvalidManifestError:
            return  # its status says so
        except KubeApiError as error:
            logger.warning("%s: not scaled: %s", key, error)
        except Exception as error:
            logger.exception("%s: not scaled, for a fault of the operator", key)
            self._hold(key, obj, roles, error)

    def _decide(
        self, key: ServiceKey, obj: KubeObject, situations: dict[str, RoleSituation], scaled: Collection[str]
    ) -> None:
        """`situations`: of some roles or of all; of those that are not `scaled` only their work counts."""
        memories, before = self._memories.get(key, {}), self._ledger.scaling_of(key).verdicts
        if before.keys() - scaled:
            self._metrics.forget_scaling(key)  # of a role that is no longer scaled
        decided = decide_together(situations, memories)
        self._memories[key] = memories | {role: memory for role, (_, memory) in decided.items()}
        verdicts = {role: each for role, each in before.items() if role in scaled}
        verdicts |= {role: verdict for role, (verdict, _) in decided.items() if role in scaled}
        if any(_can_answer(role) and verdict.replicas == 0 for role, verdict in verdicts.items()):
            self._asleep[key] = obj
        else:
            self._asleep.pop(key, None)
        self._record(key, situations, verdicts)

    def _hold(self, key: ServiceKey, obj: KubeObject, roles: Sequence[EngineRole], error: Exception) -> None:
        """Until the next turn: between turns too, or it would be logged each second. `roles` is empty where it was they
        that could not be told: what was decided for roles before is held then.
        """
        self._asleep.pop(key, None)
        before = self._ledger.scaling_of(key)
        wanted = {role.name: role.replicas for role in roles} | replicas_by_role(before, obj)
        names: list[str] = [role.name for role in roles] or list(before.replicas)
        message = f"the operator failed to decide, by a {type(error).__name__}: its log says where"
        verdicts = {name: Verdict(wanted[name], None, message, held=HoldReason.DECISION_FAILED) for name in names}
        self._memories[key] = {role: Memory() for role in verdicts} | self._memories.get(key, {})
        self._metrics.count_scaling_error(error)
        self._metrics.show_scaling(key, verdicts, {})
        self._put(key, verdicts, ())

    async def _situations(self, scaled: _Scaled, turn: _Turn) -> dict[str, RoleSituation] | None:
        """Of all roles; of those at zero where only routers were to be asked, and None where none has answered."""
        key, pods, is_behind_gateway = scaled.key, scaled.pods, scaled.service.is_behind_gateway
        wanted = replicas_by_role(self._ledger.scaling_of(key), scaled.obj)
        at_zero = [role for role in scaled.roles if wanted.get(role.name) == 0]
        routers = turn.gateway if is_behind_gateway else of_role(pods, ROLE_ROUTER)
        asleep = None
        if any(_can_answer(role.name) for role in at_zero):
            asleep = await self._measure_asleep(str(key) if is_behind_gateway else None, routers)
        if asleep is None and turn.reading is None:
            return None
        names = None if is_behind_gateway and not routers else {pod["metadata"]["name"] for pod in routers}
        situations: dict[str, RoleSituation] = {}
        for role in at_zero if turn.reading is None else scaled.roles:
            measured = asleep if role in at_zero else None
            if measured is None:
                assert turn.reading is not None
                measured = await self._measure(turn.reading, RoleKey(key, role.name), names, pod_names(pods, role.name))
            sample, former_days, trouble = measured
            now, current = self._clock.pods(), wanted.get(role.name, role.replicas)
            situations[role.name] = RoleSituation(
                role.name,
                _spec_of(role, scaled.roles),
                self._clock.unix(),
                current,
                ready_seconds(pods, role.name, now),
                sample,
                trouble,
                is_rolling(scaled.obj),
                current > 0 and is_beginning(pods, role.name, now),
                startup_seconds(pods, role.name),
                former_days,
                turn_seconds=turn.seconds,
                slots=role.engine.max_num_seqs * role.parallelism.data,
                routers=seconds_ready(routers, now),
            )
        return situations

    async def _measure(
        self, reading: Reading, role: RoleKey, routers: Collection[str] | None, engines: Collection[str]
    ) -> Measured:
        try:
            sample, former_days = await reading.read(role, routers, engines)
        except PrometheusError as error:
            return None, (), str(error)
        asked_at = self._clock.unix() + self._prometheus.clock.ahead_seconds
        return replace(sample, asked_at=asked_at), former_days, ""

    async def _measure_asleep(self, service: str | None, routers: Sequence[KubeObject]) -> Measured | None:
        """By the routers themselves; None where none answers. `service`: its name behind a gateway."""
        addresses = [ip for pod in routers if (ip := pod.get("status", {}).get("podIP"))]
        async with self._at_once:
            held = await self._read_held(addresses, service) if addresses else None
        if held is None:
            return None
        return RoleSample(self._clock.unix(), (), held.num_requests, held.num_tokens), (), ""

    def _record(self, key: ServiceKey, situations: dict[str, RoleSituation], verdicts: dict[str, Verdict]) -> None:
        now, before = self._clock.text(), {role: each.current for role, each in situations.items()}
        changed = {role: each for role, each in verdicts.items() if each.replicas != before.get(role, each.replicas)}
        entries = tuple(entry_of(role, before[role], each, now) for role, each in changed.items())
        self._metrics.show_scaling(key, verdicts, changed)
        for entry in entries:
            logger.info("%s: %s", key, entry)
        self._put(key, verdicts, entries)

    def _put(self, key: ServiceKey, verdicts: Mapping[str, Verdict], entries: tuple[dict[str, Any], ...]) -> None:
        before = self._ledger.scaling_of(key)
        after = ServiceScaling(verdicts, (*before.entries, *entries)[-MAX_ENTRIES:])
        self._ledger.record(key, after)
        if entries or _reason(after) != _reason(before):  # the text of the same trouble changes with each turn
            self._wake(key)

    def _forget(self, key: ServiceKey) -> None:
        if self._memories.pop(key, None) is not None:
            self._metrics.forget_scaling(key)
        self._ledger.forget(key)
        self._asleep.pop(key, None)


def _can_answer(role: str) -> bool:
    """Without a replica of it every request is held."""
    return role != "prefill"


def _spec_of(role: EngineRole, roles: Iterable[EngineRole]) -> AutoscalingSpec:
    """One that is not scaled stays as it is, and is measured for its work as the other is."""
    if role.autoscaling is not None:
        return role.autoscaling
    other = next(each.autoscaling for each in roles if each.autoscaling is not None)
    return replace(other, min_replicas=role.replicas, max_replicas=role.replicas)


def _reason(scaling: ServiceScaling) -> Reason | None:
    return None if scaling.trouble is None else scaling.trouble.reason


def is_rolling(obj: KubeObject) -> bool:
    """Or may be about to: its pass has not seen the spec yet. One that is halted or paused may stay so for days, and
    its pods are as steady as others."""
    status = obj.get("status", {})
    if status.get("observedGeneration") != obj["metadata"]["generation"]:
        return True
    progressing = find_condition(status.get("conditions", []), ConditionType.PROGRESSING) or {}
    return bool(progressing.get("reason") == Reason.ROLLOUT_IN_PROGRESS)
