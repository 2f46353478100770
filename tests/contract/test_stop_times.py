"""A pod's grace is the operator's to give, and what an engine does in it the runtime's: the second must fit in."""

from typing import Any

import pytest

from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings
from kvasir_runtime.flags import Parser, add_flags
from kvasir_runtime.server.launch import LAST_ANSWERS_SECONDS, MOST_KEPT_SECONDS

SETTINGS = OperatorSettings()
SPLIT = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


@pytest.mark.parametrize(
    "spec", [{}, {"rollout": {"drainTimeout": "0s"}}, {"disaggregation": SPLIT}, {"engine": {"kvTransfer": True}}]
)
def test_after_its_drain_an_engine_has_time_for_its_last_answers_and_for_the_blocks_it_keeps(
    spec: dict[str, Any],
) -> None:
    kind = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}
    metadata = {"name": "llama", "namespace": "models"}
    service = parse_service({**kind, "metadata": metadata, "spec": {"model": {"source": "pvc://models/big"}, **spec}})
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser)
    for role in engine_roles(service, SETTINGS.defaults):
        pod = engine_pod_template(service, role, SETTINGS)["spec"]
        drain_seconds = parser.parse_all(pod["containers"][0]["command"][2:]).shutdown_timeout
        after_drain_seconds = pod["terminationGracePeriodSeconds"] - drain_seconds
        assert after_drain_seconds > LAST_ANSWERS_SECONDS + MOST_KEPT_SECONDS
