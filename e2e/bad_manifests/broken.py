"""What can be wrong with a service that the API server accepts: one field each, what the status must say, the cure."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from e2e.live_cluster import KubeObject

MANIFEST = Path(__file__).parent / "service.yaml"
SPEC: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())["spec"]
KEYS = "api-keys"
CRASHES = ("ContainerFailed", "CrashLooping")
"""After the first end, and after more of them."""


@dataclass(frozen=True)
class Broken:
    """What the condition Ready must tell; `cure` is a merge patch of the spec."""

    name: str
    reasons: tuple[str, ...]
    """Any of them."""
    says: tuple[str, ...]
    """Words that the message must hold, all of them: the thing that is missing or wrong, by its name."""
    spec: dict[str, Any] = field(default_factory=dict)
    cure: dict[str, Any] | None = None
    before: tuple[KubeObject, ...] = ()
    """Objects that are in the namespace first."""
    remedy: tuple[KubeObject, ...] = ()
    """Objects that are applied to cure it."""


def quota(memory: str) -> KubeObject:
    hard = {"requests.memory": memory}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}}


def secret(name: str) -> KubeObject:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"a-tenant": "a-key"}}


BROKEN = [
    Broken(
        "image missing",
        ("ImagePullFailed",),
        ("kvasir.dev/nobody-made-this:1",),
        spec={"pod": SPEC["pod"] | {"image": "kvasir.dev/nobody-made-this:1"}},
        cure={"pod": {"image": None}},
    ),
    Broken(
        "no capacity",
        ("InsufficientCapacity",),
        ("Insufficient example.com/absent",),
        spec={
            "engine": SPEC["engine"] | {"device": "auto"},
            "resources": SPEC["resources"] | {"accelerator": "example.com/absent"},
        },
        cure={"resources": {"accelerator": "none"}},
    ),
    Broken(
        "feature not there yet",
        ("UnsupportedFeature",),
        ("spec.engine.quantization",),
        spec={"engine": SPEC["engine"] | {"quantization": "int8"}},
        cure={"engine": {"quantization": "auto"}},
    ),
    Broken(
        "quota exceeded",
        ("QuotaExceeded",),
        ("exceeded quota: small", "limited: requests.memory=1Gi"),
        before=(quota("1Gi"),),
        remedy=(quota("8Gi"),),
    ),
    Broken(
        "secret missing",
        ("SecretNotFound",),
        (KEYS,),
        spec={"router": SPEC["router"] | {"apiKeysSecretRef": {"name": KEYS}}},
        remedy=(secret(KEYS),),
    ),
    Broken(
        "model folder missing",
        ("ModelNotFound",),
        ("/models/nothing",),
        spec={"model": {"source": "file:///models/nothing"}},
        cure={"model": SPEC["model"]},
    ),
    Broken(
        "folder without a checkpoint",
        CRASHES,
        ("config.json",),
        spec={"model": {"source": "file:///models"}},
        cure={"model": SPEC["model"]},
    ),
    Broken(
        "unknown flag",
        CRASHES,
        ("--no-such-flag",),
        spec={"engine": SPEC["engine"] | {"args": ["--no-such-flag"]}},
        cure={"engine": {"args": None}},
    ),
]

REFUSED = {
    "unknown field": ({"engine": SPEC["engine"] | {"maxSeqs": 4}}, 'unknown field "spec.engine.maxSeqs"'),
    "contradiction": ({"replicas": 2, "autoscaling": {"maxReplicas": 2}}, "write replicas or autoscaling, not both"),
    "no such value": ({"engine": SPEC["engine"] | {"device": "tpu"}}, 'supported values: "auto", "cuda", "cpu"'),
}
"""What `kubectl apply` itself refuses, with the words that it must say."""
