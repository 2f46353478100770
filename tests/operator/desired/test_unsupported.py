"""What this release does not act on is named by its field, with what happens instead."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired import unsupported_features

MakeService = Callable[..., InferenceService]
TABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": {"quantization": "fp8"}}, "spec.engine.quantization", "fp8 is not supported yet"),
    ({"engine": {"kvCache": {"dtype": "fp8_e5m2"}}}, "spec.engine.kvCache.dtype", "fp8_e5m2"),
    ({"engine": {"kvCache": {"hostMemory": "8Gi"}}}, "spec.engine.kvCache.hostMemory", "no host tier"),
    ({"engine": {"kvCache": {"disk": {"sizeLimit": "1Gi"}}}}, "spec.engine.kvCache.disk", "no disk tier"),
    ({"engine": {"adapters": {}}}, "spec.engine.adapters", "only the base model"),
    ({"parallelism": {"tensor": 4}}, "spec.parallelism.tensor", "4 is not supported yet"),
    ({"parallelism": {"pipeline": 2}}, "spec.parallelism.pipeline", "one rank"),
    ({"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}, "spec.autoscaling", "stays 2"),
    ({"router": {"mode": "gateway"}}, "spec.router.mode", "2 routers of the service's own"),
    ({"router": {"policy": "powerOfTwo"}}, "spec.router.policy", "finishTime decides"),
]


@pytest.mark.parametrize(("spec", "path", "message"), TABLE, ids=[path for _, path, _ in TABLE])
def test_names_the_field_and_what_happens_instead(
    make_service: MakeService, spec: dict[str, Any], path: str, message: str
) -> None:
    [feature] = unsupported_features(make_service(**spec))

    assert (feature.field_path, feature.is_blocking) == (path, False)
    assert message in feature.message


@pytest.mark.parametrize("source", ["hf://org/name", "s3://bucket/x"])
def test_a_source_without_a_loader_blocks(make_service: MakeService, source: str) -> None:
    [feature] = unsupported_features(make_service(model={"source": source}))

    assert feature.is_blocking
    assert str(feature).startswith("spec.model.source: this release has no loader for")


@pytest.mark.parametrize("source", ["hf://org/draft", "s3://bucket/draft"])
def test_a_draft_model_without_a_loader_blocks(make_service: MakeService, source: str) -> None:
    [feature] = unsupported_features(make_service(engine={"speculative": {"method": "eagle3", "model": source}}))

    assert feature.is_blocking
    assert str(feature).startswith("spec.engine.speculative.model: this release has no loader for")


@pytest.mark.parametrize("method", [{"method": "suffix"}, {"method": "draftModel", "model": "pvc://drafts"}])
def test_speculation_is_acted_on(make_service: MakeService, method: dict[str, Any]) -> None:
    assert unsupported_features(make_service(engine={"speculative": method})) == []


def test_a_split_service_names_the_split_and_its_roles_parallelism(make_service: MakeService) -> None:
    split = {"prefill": {"replicas": 2}, "decode": {"parallelism": {"tensor": 2}}}
    features = unsupported_features(make_service(disaggregation=split))

    assert [f.field_path for f in features] == [
        "spec.disaggregation",
        "spec.disaggregation.decode.parallelism.tensor",
    ]
    assert "3 replicas do prefill and decode alike" in features[0].message
