"""What this release does not act on is named by its field, with what happens instead."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.crd import crd
from kvasir_operator.api.defaults import InstallationDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.desired.unsupported import blocking, unsupported_features
from kvasir_operator.resources.engine_resources import engine_resources

MakeService = Callable[..., InferenceService]
VOLUME = {"source": "pvc://models"}
TABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": {"kvCache": {"dtype": "fp8_e5m2"}}}, "spec.engine.kvCache.dtype", "fp8_e5m2"),
    ({"engine": {"kvCache": {"hostMemory": "8Gi"}}}, "spec.engine.kvCache.hostMemory", "no host tier"),
    ({"engine": {"kvCache": {"disk": {"sizeLimit": "1Gi"}}}}, "spec.engine.kvCache.disk", "no disk tier"),
    ({"engine": {"adapters": {}}}, "spec.engine.adapters", "only the base model"),
    ({"model": VOLUME | {"secretRef": {"name": "s"}}}, "spec.model.secretRef", "nothing is downloaded"),
    ({"model": VOLUME | {"cache": {"claim": "c"}}}, "spec.model.cache", "nothing is downloaded"),
    ({"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}, "spec.autoscaling", "stays 2"),
    ({"autoscaling": {"minReplicas": 0, "maxReplicas": 8}}, "spec.autoscaling", "stays 1"),
]


@pytest.mark.parametrize(("spec", "path", "message"), TABLE, ids=[f"{path}: {message}" for _, path, message in TABLE])
def test_names_the_field_and_what_happens_instead(
    make_service: MakeService, spec: dict[str, Any], path: str, message: str
) -> None:
    [feature] = unsupported_features(make_service(**spec))

    assert (feature.field_path, feature.is_blocking) == (path, False)
    assert message in feature.message


BLOCKING: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": {"quantization": "fp8"}}, "spec.engine.quantization", "fp8 is not supported yet"),
    ({"engine": {"quantization": "int8"}}, "spec.engine.quantization", "may not fit"),
    ({"engine": {"quantization": "int4"}}, "spec.engine.quantization", "write none"),
    ({"router": {"mode": "gateway"}}, "spec.router.mode", "set gateway.enabled in the chart's values, or write mode"),
]


@pytest.mark.parametrize(("spec", "path", "message"), BLOCKING, ids=[f"{path}: {said}" for _, path, said in BLOCKING])
def test_what_would_crash_or_waste_devices_starts_no_engine(
    make_service: MakeService, spec: dict[str, Any], path: str, message: str
) -> None:
    [feature] = blocking(unsupported_features(make_service(**spec)))

    assert str(feature).startswith(f"{path}: ")
    assert message in feature.message
    assert feature.message.endswith("; no engine is started")


@pytest.mark.parametrize(
    ("name", "is_blocked"),
    [
        ("amd.com/gpu", True),
        ("gpu.intel.com/i915", True),
        ("habana.ai/gaudi", True),
        ("google.com/tpu", True),
        ("aws.amazon.com/neuron", True),
        ("huawei.com/Ascend910", True),
        ("nvidia.com/gpu", False),
        ("nvidia.com/mig-1g.5gb", False),
        ("volcano.sh/vgpu-number", False),
        ("example.com/gpu", False),
    ],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_devices_of_other_vendors_are_not_held_by_engines_that_cannot_use_them(
    make_service: MakeService, name: str, is_blocked: bool, is_split: bool
) -> None:
    resources = {"resources": {"accelerator": name}}
    spec = {"disaggregation": {"prefill": {}, "decode": resources}} if is_split else resources
    path = "spec.disaggregation.decode.resources.accelerator" if is_split else "spec.resources.accelerator"
    for changes, blocked in (({}, is_blocked), ({"pod": {"image": "mine"}}, False)):
        service = make_service(**spec, **changes)
        found = blocking(unsupported_features(service, roles=engine_roles(service, InstallationDefaults())))
        assert [feature.field_path for feature in found] == [path] * blocked


ENGINE_FIELDS = sorted({path for _, path, _ in (*TABLE, *BLOCKING) if path.startswith("spec.engine.")})


@pytest.mark.parametrize("path", ENGINE_FIELDS)
def test_the_crd_says_of_an_engines_field_that_it_is_not_acted_on(path: str) -> None:
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        schema = schema["properties"][name]
    assert "Not acted on yet" in schema["description"]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"engine": {"args": ["--seed", "1", "--enforce-eager"]}}, "spec.engine.args"),
        ({"engine": {"args": ["--enforce-eager=true"]}}, "spec.engine.args"),
        ({"engine": {"args": ["--seed=1", "--no-enable-prefix"]}}, "spec.engine.args"),
        ({"engine": {"args": ["--speculative-config.method=ngram", "--enforce.eager"]}}, "spec.engine.args"),
        (
            {"disaggregation": {"prefill": {"engine": {"args": ["--enforce-eager"]}}, "decode": {}}},
            "spec.disaggregation.prefill.engine.args",
        ),
    ],
    ids=str,
)
def test_a_flag_that_the_engine_does_not_have_is_named_before_a_model_is_downloaded(
    make_service: MakeService, spec: dict[str, Any], path: str
) -> None:
    service = make_service(**spec)
    [feature] = unsupported_features(service, roles=engine_roles(service, InstallationDefaults()))
    assert (feature.field_path, feature.is_blocking) == (path, False)
    assert "has no --" in feature.message
    own = make_service(**spec, pod={"image": "engine:own"}) if path == "spec.engine.args" else make_service()
    assert unsupported_features(own, roles=engine_roles(own, InstallationDefaults())) == []


@pytest.mark.parametrize(
    "source", ["pvc://models", "oci://r.example/m:1", "file:///models/m", "hf://org/name", "s3://bucket/x"]
)
def test_every_source_is_acted_on(make_service: MakeService, source: str) -> None:
    assert unsupported_features(make_service(model={"source": source})) == []


@pytest.mark.parametrize("method", [{"method": "suffix"}, {"method": "draftModel", "model": "pvc://drafts"}])
def test_speculation_is_acted_on(make_service: MakeService, method: dict[str, Any]) -> None:
    assert unsupported_features(make_service(engine={"speculative": method})) == []


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_weights_as_they_are_stored_are_supported(make_service: MakeService, quantization: str) -> None:
    assert unsupported_features(make_service(engine={"quantization": quantization})) == []


SPLIT: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}, ["spec.disaggregation.decode.autoscaling"]),
    ({"parallelism": {"tensor": 2, "expert": True}}, []),
]
PARTITION = "--pipeline-layer-partition"


@pytest.mark.parametrize(("decode", "reported"), SPLIT, ids=["alone", "autoscaled", "of tensor ranks"])
def test_roles_that_are_apart_are_acted_on_but_for_their_scaling(
    make_service: MakeService, decode: dict[str, Any], reported: list[str]
) -> None:
    features = unsupported_features(make_service(disaggregation={"prefill": {}, "decode": decode}))

    assert [feature.field_path for feature in features] == reported
    assert not blocking(features)


@pytest.mark.parametrize(("num_copies", "is_blocked"), [(2, False), (43, False), (44, True)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_of_copies_exchange_kv_while_each_has_a_port(
    make_service: MakeService, role: str, num_copies: int, is_blocked: bool
) -> None:
    split = {"prefill": {}, "decode": {}, role: {"parallelism": {"data": num_copies}}}
    features = unsupported_features(make_service(disaggregation=split))

    assert features == blocking(features)
    paths = [feature.field_path for feature in features]
    assert paths == ([f"spec.disaggregation.{role}.parallelism.data"] if is_blocked else [])


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (64, 64), (1, 2), (2, 1), (2, 3)])
def test_roles_exchange_kv_between_equally_many_stages(make_service: MakeService, prefill: int, decode: int) -> None:
    """Whatever the tensor degrees are."""
    roles = {"prefill": {"tensor": 2, "pipeline": prefill}, "decode": {"pipeline": decode}}
    split = {name: {"parallelism": parallelism} for name, parallelism in roles.items()}
    features = unsupported_features(make_service(disaggregation=split))

    assert features == blocking(features)
    assert [feature.field_path for feature in features] == (
        [] if prefill == decode else ["spec.disaggregation.decode.parallelism.pipeline"]
    )
    assert all(f"{decode}, but {prefill} for prefill" in feature.message for feature in features)


@pytest.mark.parametrize(
    ("engine", "prefill", "decode", "said"),
    [
        ([], [], [], None),
        ([PARTITION, "42,38"], [], [], None),
        ([], [PARTITION, "42,38"], [f"{PARTITION}=42,38"], None),
        ([PARTITION, "42,38"], [PARTITION, "40,40"], [PARTITION, "40,40"], None),
        ([], [], [PARTITION, "42,38"], "is 42,38, and for prefill left out"),
        ([PARTITION, "42,38"], [f"{PARTITION}=40,40"], [], "is 42,38, and for prefill 40,40"),
    ],
)
def test_roles_exchange_kv_between_stages_of_the_same_layers(
    make_service: MakeService, engine: list[str], prefill: list[str], decode: list[str], said: str | None
) -> None:
    split = {
        name: {"parallelism": {"pipeline": 2}, "engine": {"args": args}}
        for name, args in (("prefill", prefill), ("decode", decode))
    }
    features = blocking(unsupported_features(make_service(disaggregation=split, engine={"args": engine})))

    if said is None:
        assert not features
    else:
        [feature] = features
        assert feature.field_path == "spec.disaggregation.decode.engine.args"
        assert f"{PARTITION} {said}" in feature.message


def test_roles_that_are_apart_need_a_prefix_cache(make_service: MakeService) -> None:
    split, without = {"prefill": {}, "decode": {}}, {"kvCache": {"prefixCaching": False}}
    [feature] = blocking(unsupported_features(make_service(disaggregation=split, engine=without)))

    assert feature.field_path == "spec.engine.kvCache.prefixCaching"
    assert unsupported_features(make_service(engine=without)) == []


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"engine": {"kvTransfer": True, "kvCache": {"prefixCaching": False}}}, "spec.engine.kvCache.prefixCaching"),
        ({"engine": {"kvTransfer": True}, "parallelism": {"data": 44}}, "spec.parallelism.data"),
    ],
)
def test_what_the_engine_refuses_beside_kv_transfer_starts_no_engine(
    make_service: MakeService, fields: dict[str, Any], path: str
) -> None:
    [feature] = blocking(unsupported_features(make_service(**fields)))
    assert feature.field_path == path
    without = fields["engine"] | {"kvTransfer": False}
    assert not unsupported_features(make_service(**fields | {"engine": without}))


@pytest.mark.parametrize("degree", ["tensor", "pipeline", "data"])
def test_ranks_may_exchange_kv(make_service: MakeService, degree: str) -> None:
    service = make_service(engine={"kvTransfer": True}, parallelism={degree: 2})
    assert not unsupported_features(service)


@pytest.mark.parametrize("degree", [{"tensor": 8}, {"pipeline": 4}, {"data": 2}, {"tensor": 2, "expert": True}])
def test_every_kind_of_parallelism_is_acted_on(make_service: MakeService, degree: dict[str, Any]) -> None:
    assert unsupported_features(make_service(parallelism=degree)) == []


def test_the_gateway_is_acted_on_where_the_installation_has_one(make_service: MakeService) -> None:
    assert unsupported_features(make_service(router={"mode": "gateway"}), has_gateway=True) == []


def test_the_accelerators_number_is_not_said_twice(make_service: MakeService) -> None:
    service = make_service(parallelism={"tensor": 2}, resources={"extra": {"nvidia.com/gpu": 1}})
    roles = engine_roles(service, InstallationDefaults())
    [feature] = unsupported_features(service, roles=roles)
    assert (feature.field_path, feature.is_blocking) == ("spec.resources.extra", False)
    assert engine_resources(roles[0])["limits"]["nvidia.com/gpu"] == "2"


def test_the_gateways_probes_are_its_own(make_service: MakeService) -> None:
    service = make_service(router={"mode": "gateway", "probes": {"timeoutSeconds": 9}})
    found = unsupported_features(service, has_gateway=True)
    assert [each.field_path for each in found] == ["spec.router.probes"]
    assert not any(each.is_blocking for each in found)


@pytest.mark.parametrize("policy", ["finishTime", "roundRobin", "sessionAffinity"])
def test_every_policy_is_acted_on(make_service: MakeService, policy: str) -> None:
    assert unsupported_features(make_service(router={"policy": policy})) == []


DRAFTED = {"speculative": {"method": "eagle3", "model": "hf://org/draft"}}


@pytest.mark.parametrize("spec", [{"model": {"source": "s3://bucket/x"}}, {"model": VOLUME, "engine": DRAFTED}])
def test_credentials_and_cache_are_acted_on_where_anything_is_downloaded(
    make_service: MakeService, spec: dict[str, Any]
) -> None:
    model = spec["model"] | {"secretRef": {"name": "s"}, "cache": {"claim": "c"}}

    assert unsupported_features(make_service(**spec | {"model": model})) == []
