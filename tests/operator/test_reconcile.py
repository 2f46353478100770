"""What a pass does where a real API server cannot easily be brought: bad stored specs, deletion under way, outages."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL, TRAFFIC_WEIGHT
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.ledger import ScalingLedger, ServiceScaling, entry_of
from kvasir_operator.autoscaling.situation import Verdict
from kvasir_operator.errors import (
    ChildrenRefusedError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
    ServerFailedError,
)
from kvasir_operator.kube.kinds import EVENT, INFERENCE_SERVICE, SECRET, Kind, ServiceKey
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.observe.engine_http import (
    ReadContexts,
    ReadDownloads,
    read_contexts,
    read_downloads,
)
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.observe.model_loader import DownloadProgress
from kvasir_operator.observe.replicas import EngineContext
from kvasir_operator.queue.schedule import KeySchedule
from kvasir_operator.queue.work_queue import WorkQueue
from kvasir_operator.queue.worker import work
from kvasir_operator.reconcile import LEFT_RETRY_SECONDS, Outcome, Reconciler
from kvasir_operator.settings import OperatorSettings
from kvasir_operator.status.restarts import RestartCounter

from .cluster_objects import NOW, child, deployment, member, owner, pod, pod_event, service, waiting_container
from .memory_kube import MemoryKube

KEY = ServiceKey("models", "llama")
FEATURES = frozenset()
SPEC = {"model": {"source": "pvc://checkpoints/model"}, "engine": {"device": "cpu"}}


def kube_with(spec: dict[str, Any], **metadata: Any) -> MemoryKube:
    kube, obj = MemoryKube(), service()
    obj["metadata"] |= metadata
    kube.objects[(INFERENCE_SERVICE.kind, KEY.namespace, obj["metadata"]["name"])] = {**obj, "spec": spec}
    return kube


def reconcile(
    kube: MemoryKube,
    do_changes_wait: bool = False,
    restarts: RestartCounter | None = None,
    read_downloads: ReadDownloads = read_downloads,
    read_contexts: ReadContexts = read_contexts,
    name: str = KEY.name,
) -> Outcome:
    """By a process that knows of no pass before."""
    gateway = GatewayObserver(kube, None, None, lambda key: None)
    reconciler = Reconciler(
        kube,
        OperatorSettings(),
        lambda: FEATURES,
        gateway,
        lambda: NOW,
        read_downloads=read_downloads,
        read_contexts=read_contexts,
        do_changes_wait=lambda key: do_changes_wait,
        restarts=restarts,
    )
    return asyncio.run(reconciler.reconcile(ServiceKey(KEY.namespace, name)))


def stored_status(kube: MemoryKube) -> dict[str, Any]:
    status: dict[str, Any] = kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["status"]
    return status


def test_a_service_that_is_not_there_or_being_deleted_is_gone() -> None:
    assert reconcile(MemoryKube()) == Outcome(is_gone=True)
    leaving = kube_with(SPEC, deletionTimestamp=NOW)
    assert reconcile(leaving) == Outcome(is_gone=True)
    assert leaving.writes == []


def test_restarts_that_passes_see_are_series_until_the_service_is_gone() -> None:
    kube, restarts = kube_with(SPEC), RestartCounter()
    for num_restarts in (0, 2):
        seen = {"containerStatuses": [{"name": "engine", "restartCount": num_restarts}]}
        kube.objects[("Pod", "models", "engine")] = pod("engine", **seen)
        reconcile(kube, restarts=restarts)
    assert [sample.value for family in restarts.collect() for sample in family.samples] == [2.0]
    del kube.objects[(INFERENCE_SERVICE.kind, *KEY)]
    reconcile(kube, restarts=restarts)
    assert [sample.value for family in restarts.collect() for sample in family.samples] == []


def test_a_spec_that_does_not_hold_is_reported_and_the_children_stay() -> None:
    kube = kube_with({"model": {"source": "nonsense"}})
    running = deployment()
    running["metadata"]["ownerReferences"] = [owner()]
    running["spec"]["template"]["spec"] = {"containers": []}
    kube.objects[("Deployment", "models", "llama-serve-aaaa")] = running
    kube.objects[("Service", "models", "llama-serve-aaaa")] = child("Service", "llama-serve-aaaa")
    assert reconcile(kube) == Outcome()
    (degraded,) = (each for each in stored_status(kube)["conditions"] if each["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "spec.model.source" in degraded["message"]
    assert [role["role"] for role in stored_status(kube)["roles"]] == ["serve"]
    assert {verb for verb, _ in kube.writes} == {"create", "apply status"}  # the Event and the status


def test_what_pods_need_is_made_again_while_the_spec_does_not_hold() -> None:
    kube = kube_with(SPEC)
    reconcile(kube)
    [(_, namespace, name)] = [key for key in kube.objects if key[0] == "Deployment" and "serve" in key[2]]
    made = kube.objects.pop(("Service", namespace, name))
    kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["spec"] = {"model": {"source": "nonsense"}}
    reconcile(kube)
    assert kube.objects[("Service", namespace, name)]["spec"] == made["spec"]
    assert f"created Service {name}" in [each.get("message") for each in kube.objects.values()]
    kube.writes.clear()
    reconcile(kube)
    assert kube.writes == []


def test_an_invalid_spec_is_not_reported_twice() -> None:
    kube = kube_with({"model": {"source": "nonsense"}})
    reconcile(kube)
    kube.writes.clear()
    reconcile(kube)
    assert kube.writes == []


def test_a_pass_whose_reads_fail_writes_nothing() -> None:
    kube = kube_with(SPEC)
    kube.failures = [None, None, None, KubeUnavailableError("down")]
    with pytest.raises(KubeUnavailableError):
        reconcile(kube)
    assert kube.writes == []


@pytest.mark.parametrize(
    "error", [KubeForbiddenError("secrets is forbidden", 403), ServerFailedError("no matching prefix found", 500)]
)
def test_what_one_object_that_cannot_be_read_holds_up_is_said_and_the_rest_of_the_status_stands(
    error: KubeApiError,
) -> None:
    class Unreadable(MemoryKube):
        is_unreadable = True

        async def get(self, kind: Kind, *args: Any) -> dict[str, Any] | None:
            if kind == SECRET and self.is_unreadable:
                raise error
            return await super().get(kind, *args)

    kube = Unreadable()
    kube.objects = kube_with(SPEC).objects
    with pytest.raises(type(error)):
        reconcile(kube)
    assert {each["type"]: each["status"] for each in stored_status(kube)["conditions"]} == {
        "Ready": "False",
        "Degraded": "True",
    }
    assert all(str(error) in each["message"] for each in stored_status(kube)["conditions"])
    kube.is_unreadable = False
    reconcile(kube)
    before = stored_status(kube)
    assert before["observedGeneration"] == 3
    kube.is_unreadable = True
    with pytest.raises(type(error)):
        reconcile(kube)
    changed = {key: value for key, value in stored_status(kube).items() if value != before.get(key)}
    assert changed.keys() == {"phase", "conditions"}
    assert [each["type"] for each in changed["conditions"] if each not in before["conditions"]] == ["Degraded"]
    num_writes = len(kube.writes)
    with pytest.raises(type(error)):
        reconcile(kube)
    assert len(kube.writes) == num_writes


@pytest.mark.parametrize(
    "error",
    [
        KubeForbiddenError("events is forbidden", 403),
        ObjectRefusedError("invalid", 422),
        ObjectNotFoundError("expired between two requests", 404),
        ObjectConflictError("changed", 409),
    ],
)
def test_an_event_that_cannot_be_posted_does_not_hold_up_the_status(error: KubeApiError) -> None:
    class NoEvents(MemoryKube):
        async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
            if obj["kind"] == EVENT.kind:
                raise ObjectConflictError("already exists", 409)
            return await super().create(obj)

        async def merge(self, kind: Kind, *args: Any) -> dict[str, Any]:
            if kind == EVENT:
                raise error
            return await super().merge(kind, *args)

    kube = NoEvents()
    kube.objects = kube_with(SPEC).objects
    reconcile(kube)
    assert stored_status(kube)["observedGeneration"] == 3


@pytest.mark.parametrize("spec", [SPEC, {"model": {"source": "nonsense"}}])
def test_a_status_that_was_not_stored_as_the_object_had_changed_is_derived_again_soon(spec: dict[str, Any]) -> None:
    """Labels and annotations are no news of the spec, so no event wakes the service."""

    class Annotated(MemoryKube):
        async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
            self.objects[(INFERENCE_SERVICE.kind, *KEY)]["metadata"]["resourceVersion"] = "10"
            return await super().create(obj)

    kube = Annotated()
    kube.objects = kube_with(spec).objects
    assert reconcile(kube) == Outcome(retry_seconds=1.0)
    assert stored_status(kube) == {}
    assert reconcile(kube) == Outcome()
    assert stored_status(kube)["observedGeneration"] == 3


@pytest.mark.parametrize("labels", [{}, {ROLE_LABEL: "gateway"}], ids=["no role", "a role that we have not"])
def test_a_deployment_of_somebody_else_that_has_the_services_label_is_no_role(labels: dict[str, str]) -> None:
    kube, theirs = kube_with(SPEC), deployment()
    theirs["metadata"] |= {"name": "benchmark", "uid": "uid-of-theirs", "labels": {SERVICE_LABEL: "llama", **labels}}
    theirs["spec"]["template"]["metadata"]["labels"] = {"app": "benchmark"}
    kube.objects[("Deployment", "models", "benchmark")] = theirs
    reconcile(kube)
    assert [role["role"] for role in stored_status(kube)["roles"]] == ["serve", "router"]


def changed_service(name: str = KEY.name) -> MemoryKube:
    """A service all of whose children are there, and whose spec has changed since."""
    kube = kube_with(SPEC, name=name)
    reconcile(kube, name=name)
    kube.objects[(INFERENCE_SERVICE.kind, KEY.namespace, name)] |= {
        "spec": SPEC | {"engine": {"device": "cpu", "maxNumSeqs": 8}}
    }
    kube.writes.clear()
    return kube


def writes_of_a_pass(kube: MemoryKube) -> list[tuple[str, str]]:
    """Verb and kind, while other changes wait."""
    kube.writes.clear()
    reconcile(kube, do_changes_wait=True)
    return [(verb, name.split()[0]) for verb, name in kube.writes]


def test_a_plain_change_starts_its_engines_and_leaves_the_rest_to_the_next_passes_while_other_changes_wait() -> None:
    kube, apply = changed_service(), "apply by kvasir-operator"
    assert writes_of_a_pass(kube) == [(apply, "Deployment")]
    assert writes_of_a_pass(kube) == [(apply, "Service"), ("patch", "Deployment")]
    assert writes_of_a_pass(kube)[-1] == ("apply status", "InferenceService")


def test_a_pass_that_has_left_something_is_followed_by_another() -> None:
    kube = changed_service()
    outcomes = [reconcile(kube, do_changes_wait=True) for _ in range(3)]
    left = Outcome(retry_seconds=LEFT_RETRY_SECONDS)
    assert outcomes == [left, left, Outcome()]


def test_the_last_pass_of_a_burst_leaves_nothing() -> None:
    kube = changed_service()
    reconcile(kube, do_changes_wait=True)
    reconcile(kube)
    written = [(verb, name.split()[0]) for verb, name in kube.writes]
    deployments_and_service = [("apply by kvasir-operator", kind) for kind in ("Deployment", "Service")]
    assert written[:3] == [*deployments_and_service, ("patch", "Deployment")]
    assert written[-1] == ("apply status", "InferenceService")


def test_a_pass_that_deletes_reports_it_at_once() -> None:
    kube = changed_service()
    unwanted = {**kube.objects[("ServiceAccount", "models", "llama-router")]}
    kube.objects[("ServiceAccount", "models", "llama-old")] = json.loads(
        json.dumps(unwanted).replace("llama-router", "llama-old")
    )
    assert writes_of_a_pass(kube) == [("apply by kvasir-operator", "Deployment")]
    assert ("delete", "ServiceAccount") in (written := writes_of_a_pass(kube))
    assert written[-1] == ("apply status", "InferenceService")


def test_a_workload_that_was_refused_is_reported_with_the_rest_done() -> None:
    class Refusing(MemoryKube):
        async def apply(self, obj: dict[str, Any], *args: Any) -> dict[str, Any]:
            if obj["kind"] == "Deployment":
                raise ObjectRefusedError("no such field", 422)
            return await super().apply(obj, *args)

    kube = Refusing()
    kube.objects = changed_service().objects
    with pytest.raises(ChildrenRefusedError, match="no such field"):
        reconcile(kube, do_changes_wait=True)
    assert [verb for verb, _ in kube.writes][-1] == "apply status"
    assert "no such field" in str(stored_status(kube)["conditions"])
    assert "Service" in [name.split()[0] for _, name in kube.writes]


def test_what_was_left_is_done_once_a_burst_of_changes_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the queue and its workers go on: each change but the last has others waiting behind it."""
    for name in ("LEFT_RETRY_SECONDS", "DETAILS_RETRY_SECONDS"):
        monkeypatch.setattr(f"kvasir_operator.reconcile.{name}", 0.0)
    names, reported = ["one", "two", "three"], asyncio.Event()

    class Reported(MemoryKube):
        async def apply_status(self, obj: dict[str, Any]) -> dict[str, Any]:
            stored = await super().apply_status(obj)
            services = [self.objects[(INFERENCE_SERVICE.kind, KEY.namespace, name)] for name in names]
            if all(each["status"].get("observedGeneration") == each["metadata"]["generation"] for each in services):
                reported.set()
            return stored

    kube = Reported()
    old, new = SPEC, SPEC | {"engine": {"device": "cpu", "maxNumSeqs": 8}}

    async def body() -> None:
        queue = WorkQueue(lambda: 0.0, KeySchedule(spacing_seconds=0.0))
        reconciler = Reconciler(
            kube,
            OperatorSettings(),
            lambda: FEATURES,
            GatewayObserver(kube, None, None, lambda key: None),
            lambda: NOW,
            do_changes_wait=queue.has_urgent,
        )
        worker = asyncio.create_task(work(queue, reconciler, OperatorMetrics()))
        async with asyncio.timeout(60):
            for generation, spec in ((1, old), (2, new)):
                reported.clear()
                for name in names:
                    obj = service(name, uid=f"uid-of-{name}", status=kube_status(kube, name))
                    obj["metadata"]["generation"] = generation
                    kube.objects[(INFERENCE_SERVICE.kind, KEY.namespace, name)] = {**obj, "spec": spec}
                    queue.add(ServiceKey(KEY.namespace, name), is_urgent=True)
                await reported.wait()
        queue.close()
        await worker

    asyncio.run(body())
    for name in names:
        at_once = changed_service(name)
        for each in (at_once, at_once, kube):  # the former revision's Service goes once it has no pods
            reconcile(each, name=name)
        assert children_of(kube, name) == children_of(at_once, name)


def kube_status(kube: MemoryKube, name: str) -> dict[str, Any]:
    status: dict[str, Any] = kube.objects.get((INFERENCE_SERVICE.kind, KEY.namespace, name), {}).get("status", {})
    return status


def children_of(kube: MemoryKube, name: str) -> dict[tuple[str, str], int | None]:
    """Each with its replicas."""
    own = {
        key: obj for key, obj in kube.objects.items() if obj["metadata"].get("labels", {}).get(SERVICE_LABEL) == name
    }
    return {(kind, child): obj.get("spec", {}).get("replicas") for (kind, _, child), obj in own.items()}


def test_what_a_rollout_makes_and_takes_away_for_its_revisions_is_no_event_of_its_own() -> None:
    kube = changed_service()
    for _ in range(3):
        reconcile(kube)
    assert [name for verb, name in kube.writes if verb == "delete"] == [f"Service {former_name(kube)}"]
    rolled = [event for event in kube.objects.values() if event["kind"] == EVENT.kind]
    assert [event["reason"] for event in rolled] == ["Created", "RevisionRolled"]


def former_name(kube: MemoryKube) -> str:
    """Of the Deployment that the rollout has left at zero."""
    [name] = [name for (kind, _, name), obj in kube.objects.items() if obj.get("spec", {}).get("replicas") == 0]
    return name


def test_what_is_reported_late_is_what_would_have_been_reported_at_once() -> None:
    late, at_once = changed_service(), changed_service()
    for _ in range(3):
        reconcile(late, do_changes_wait=True)
        reconcile(at_once)
    events = [{name for kind, _, name in kube.objects if kind == EVENT.kind} for kube in (late, at_once)]
    assert (stored_status(late), events[0]) == (stored_status(at_once), events[1])


def test_children_are_not_applied_again_and_again_while_their_namespace_goes() -> None:
    class Ending(MemoryKube):
        num_refused = 0

        async def apply(self, obj: dict[str, Any], *args: Any) -> dict[str, Any]:
            self.num_refused += 1
            raise KubeForbiddenError("unable to create new content in namespace models because it is being terminated")

    kube, now = Ending(), [0.0]
    kube.objects = kube_with(SPEC).objects
    gateway = GatewayObserver(kube, None, None, lambda key: None)
    reconciler = Reconciler(kube, OperatorSettings(), lambda: FEATURES, gateway, lambda: NOW, clock=lambda: now[0])

    async def body() -> None:
        with pytest.raises(ChildrenRefusedError, match="being terminated"):
            await reconciler.reconcile(KEY)
        num_refused = kube.num_refused
        now[0] = 4.0
        assert await reconciler.reconcile(KEY) == Outcome(retry_seconds=6.0)
        assert kube.num_refused == num_refused
        now[0] = 11.0
        with pytest.raises(ChildrenRefusedError):
            await reconciler.reconcile(KEY)

    asyncio.run(body())


def test_what_only_this_pass_knows_is_reported_at_once() -> None:
    kube = changed_service()
    del kube.objects[("Service", "models", "llama-router")]
    assert reconcile(kube, do_changes_wait=True) == Outcome()
    assert "created Service llama-router" in [event.get("message") for event in kube.objects.values()]
    assert kube.writes[-1][0] == "apply status"


def test_a_group_that_is_restarted_while_the_router_grows_is_reported_by_the_pass_that_did_it() -> None:
    """Once its pods are deleted no later pass can tell that they were."""
    kube = kube_with(SPEC | {"parallelism": {"pipeline": 2}})
    reconcile(kube)
    ended = {"name": "engine", "state": {"terminated": {"exitCode": 1, "finishedAt": NOW}}, "restartCount": 0}
    [group] = [obj for obj in kube.objects.values() if obj["kind"] == "StatefulSet"]
    for rank in (0, 1):
        of_group = {"apiVersion": "v1", "kind": "Pod", **member(rank, group, ready=False)}
        of_group["status"]["containerStatuses"] = [ended]
        kube.objects[("Pod", "models", of_group["metadata"]["name"])] = of_group
    kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["spec"]["router"] = {"replicas": 3}
    kube.writes.clear()
    reconcile(kube, do_changes_wait=True)
    assert {("apply by kvasir-operator", "Deployment"), ("delete", "Pod")} <= {
        (verb, name.split()[0]) for verb, name in kube.writes
    }
    assert "GroupRestarted" in [event.get("reason") for event in kube.objects.values()]


def test_a_canary_that_is_taken_back_gets_requests_by_its_pods_from_then_on() -> None:
    kube = kube_with(SPEC)
    reconcile(kube)
    [current] = {each["metadata"].get("labels", {}).get(REVISION_LABEL) for each in kube.objects.values()} - {None}
    for kind, *_, name in [key for key in kube.objects if key[2] == f"llama-serve-{current}"]:
        theirs = json.loads(json.dumps(kube.objects[(kind, "models", name)]).replace(current, "cccccccccc"))
        kube.objects[(kind, "models", "llama-serve-cccccccccc")] = theirs
    canary = kube.objects[("Service", "models", "llama-serve-cccccccccc")]
    canary["metadata"]["labels"][TRAFFIC_WEIGHT] = "50"
    kube.writes.clear()
    reconcile(kube)
    assert ("patch", "Service llama-serve-cccccccccc") in kube.writes
    assert TRAFFIC_WEIGHT not in kube.objects[("Service", "models", "llama-serve-cccccccccc")]["metadata"]["labels"]
    kube.writes.clear()
    reconcile(kube)
    assert ("patch", "Service llama-serve-cccccccccc") not in kube.writes


class RefusingRevision(MemoryKube):
    """A service whose new spec has a typo that the API server refuses, while a pod of the former revision serves."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = changed_service().objects
        [self.former] = [name for kind, _, name in self.objects if kind == "Deployment" and "serve" in name]
        serving, former = pod("serving"), self.objects[("Deployment", "models", self.former)]
        serving["metadata"]["labels"] = former["spec"]["template"]["metadata"]["labels"]
        self.objects[("Pod", "models", "serving")] = serving

    async def apply(self, obj: dict[str, Any], *args: Any) -> dict[str, Any]:
        if obj["kind"] == "Deployment":
            raise ObjectRefusedError("no such field", 422)
        return await super().apply(obj, *args)

    def pass_over(self) -> None:
        with pytest.raises(ChildrenRefusedError):
            reconcile(self)

    @property
    def service(self) -> tuple[str, str, str]:
        return "Service", "models", self.former

    @property
    def events(self) -> dict[str, str]:
        """Messages by reason."""
        return {obj["reason"]: obj["message"] for (kind, *_), obj in self.objects.items() if kind == EVENT.kind}


def test_the_service_of_a_revision_that_still_serves_is_made_again() -> None:
    kube = RefusingRevision()
    kube.pass_over()
    made = kube.objects.pop(kube.service)
    kube.pass_over()
    assert kube.objects[kube.service]["spec"] == made["spec"]
    assert kube.objects[kube.service]["metadata"]["labels"] == made["metadata"]["labels"]
    assert f"Service {kube.former}" in kube.events["Created"]
    kube.writes.clear()
    kube.pass_over()
    assert not [name for verb, name in kube.writes if "Service " in name and verb != "apply status"]


def test_what_somebody_else_has_made_under_the_name_of_a_former_service_is_left_alone() -> None:
    kube = RefusingRevision()
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": kube.former, "namespace": "models", "uid": "x"},
    }
    kube.objects[kube.service] = theirs
    kube.pass_over()
    assert kube.objects[kube.service] == theirs
    assert f"Service {kube.former} exists and belongs to somebody else" in str(stored_status(kube)["conditions"])


def test_a_former_workload_that_is_deleted_cannot_be_made_again_and_an_event_says_so() -> None:
    kube = RefusingRevision()
    del kube.objects[("Deployment", "models", kube.former)]
    kube.pass_over()
    assert kube.events["WorkloadDeleted"].startswith(f"{kube.former} of a former revision was deleted")


def secret_of(kube: MemoryKube) -> dict[str, Any]:
    return kube.objects[("Secret", "models", "llama-router")]


def test_a_service_keeps_the_secret_that_it_was_made_with() -> None:
    kube = kube_with(SPEC)
    reconcile(kube)
    made = secret_of(kube)
    kube.objects[(INFERENCE_SERVICE.kind, *KEY)] |= {"spec": SPEC | {"engine": {"device": "cpu", "maxNumSeqs": 8}}}
    reconcile(kube)
    assert secret_of(kube) == made


def test_a_secret_that_a_later_release_would_make_differently_is_left_as_it_is() -> None:
    kube = kube_with(SPEC)
    reconcile(kube)
    secret_of(kube)["metadata"]["annotations"] = {}
    kube.writes.clear()
    reconcile(kube)
    assert kube.writes == []


def test_a_secret_that_is_gone_is_made_anew() -> None:
    kube = kube_with(SPEC)
    reconcile(kube)
    before = kube.objects.pop(("Secret", "models", "llama-router"))
    reconcile(kube)
    assert secret_of(kube)["stringData"] != before["stringData"]


def test_secrets_are_never_listed() -> None:
    class NoLists(MemoryKube):
        async def list(self, kind: Kind, *args: Any, **fields: Any) -> list[dict[str, Any]]:
            assert kind.kind != "Secret"
            return await super().list(kind, *args, **fields)

    kube = NoLists()
    kube.objects = kube_with(SPEC).objects
    reconcile(kube)
    assert secret_of(kube)["stringData"]


def creating_pod(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **pod(name, ready=False, containerStatuses=[waiting_container("ContainerCreating")]),
    }


def ready_reason(kube: MemoryKube) -> str:
    return str(stored_status(kube)["conditions"][0]["reason"])


def test_a_pod_whose_volumes_wait_is_asked_for_its_events_and_looked_at_again() -> None:
    kube = kube_with(SPEC)
    kube.objects[("Pod", "models", "p")] = creating_pod("p")
    failure = pod_event("FailedMount", 'secret "keys" not found')
    kube.objects[("Event", "models", "of p")] = failure
    kube.objects[("Event", "models", "of another")] = pod_event("FailedMount", "hostPath", pod_name="q")
    assert reconcile(kube) == Outcome(retry_seconds=3.0)
    assert ready_reason(kube) == "SecretNotFound"


def test_a_download_is_asked_how_far_it_is_and_looked_at_again() -> None:
    loader = {"name": "model-loader", "state": {"running": {}}, "restartCount": 0}
    waits = {"containerStatuses": [waiting_container("PodInitializing")], "initContainerStatuses": [loader]}
    kube = kube_with({**SPEC, "model": {"source": "hf://org/name"}})
    kube.objects[("Pod", "models", "p")] = {"apiVersion": "v1", "kind": "Pod", **pod("p", ready=False, **waits)}

    async def ask(_: object) -> dict[str, DownloadProgress]:
        return {"p": DownloadProgress("hf://org/name", "downloading", 10**9, 4 * 10**9, 1e8, 30.0, 0.0)}

    assert reconcile(kube, read_downloads=ask) == Outcome(retry_seconds=5.0)
    assert (ready_reason(kube), stored_status(kube)["phase"]) == ("DownloadingModel", "Loading")
    [message] = [each["message"] for each in stored_status(kube)["roles"] if each["role"] == "serve"]
    assert message == "pod p: downloading hf://org/name: 1.00 of 4.00 GB, 100.0 MB/s, 30 s left"


def test_a_context_that_an_engine_has_cut_is_named_with_both_lengths_and_what_to_do() -> None:
    kube = kube_with(SPEC)
    kube.objects[("Pod", "models", "p")] = pod("p")

    async def ask(pods: Iterable[dict[str, Any]]) -> dict[str, EngineContext]:
        return {each["metadata"]["name"]: EngineContext(8192, cut_from=40960) for each in pods}

    reconcile(kube, read_contexts=ask)
    [loaded] = [each for each in stored_status(kube)["conditions"] if each["type"] == "ModelLoaded"]
    assert (loaded["status"], loaded["reason"]) == ("True", "ContextCut")
    assert all(text in loaded["message"] for text in ("8192 tokens", "40960", "resources.memory", "maxModelLen"))
    posted = [obj["reason"] for (kind, *_), obj in kube.objects.items() if kind == "Event"]
    assert "ContextCut" in posted


def test_events_that_may_not_be_read_do_not_hold_up_the_status() -> None:
    class NoEvents(MemoryKube):
        async def list(self, kind: Kind, *args: Any, **fields: Any) -> list[dict[str, Any]]:
            if kind == EVENT:
                raise KubeForbiddenError("events is forbidden", 403)
            return await super().list(kind, *args, **fields)

    kube = NoEvents()
    kube.objects = {**kube_with(SPEC).objects, ("Pod", "models", "p"): creating_pod("p")}
    reconcile(kube)
    assert ready_reason(kube) == "PullingImage"


def test_a_service_whose_pods_run_is_not_looked_at_again() -> None:
    kube = kube_with(SPEC)
    kube.objects[("Pod", "models", "p")] = {"apiVersion": "v1", "kind": "Pod", **pod("p", ready=False)}
    assert reconcile(kube) == Outcome()


def test_a_pass_brings_a_role_to_what_was_decided_and_reports_the_decision() -> None:
    kube, ledger = kube_with({**SPEC, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}}), ScalingLedger()
    verdict = Verdict(3, ScalingReason.KV_CACHE_DEMAND, "demand")
    ledger.record(KEY, ServiceScaling({"serve": verdict}, (entry_of("serve", 1, verdict, NOW),)))
    gateway = GatewayObserver(kube, None, None, lambda key: None)
    settings = OperatorSettings(prometheus_url="http://prometheus")
    reconciler = Reconciler(kube, settings, lambda: FEATURES, gateway, lambda: NOW, ledger=ledger)
    asyncio.run(reconciler.reconcile(KEY))
    asyncio.run(reconciler.reconcile(KEY))

    [engine] = [obj for (kind, _, name), obj in kube.objects.items() if kind == "Deployment" and "serve" in name]
    assert engine["spec"]["replicas"] == 3
    assert [(each["from"], each["to"]) for each in stored_status(kube)["scaling"]] == [(1, 3)]
    assert "ScalingActive" in [each["type"] for each in stored_status(kube)["conditions"]]
    kube.writes.clear()
    asyncio.run(Reconciler(kube, settings, lambda: FEATURES, gateway, lambda: NOW).reconcile(KEY))
    assert kube.writes == []  # a new leader, which has decided nothing yet, leaves it so
