"""What a manifest asks for and this release does not act on yet; it becomes the `Degraded` condition.

Nothing is ignored in silence: a field that is neither turned into a child object or flag nor listed here is a bug, and
tests/operator/desired/test_nothing_is_ignored.py looks for one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir_operator.api.model import EngineSpec, InferenceService, ModelSpec, ParallelismSpec
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.api.source import ModelSource
from kvasir_operator.resources.replicas import engine_replicas, router_replicas
from kvasir_operator.resources.router_command import DEFAULT_POLICY, SUPPORTED_POLICIES


@dataclass(frozen=True)
class UnsupportedFeature:
    """`message` says what is asked for and what happens instead; `is_blocking` where no engine can start without it."""

    field_path: str
    message: str
    is_blocking: bool = False

    def __str__(self) -> str:
        return f"{self.field_path}: {self.message}"


def unsupported_features(service: InferenceService) -> list[UnsupportedFeature]:
    """In the manifest's order; empty where all of it is acted on."""
    return [
        *_model(service.spec.model),
        *_engine(service.spec.engine),
        *_parallelism(service.spec.parallelism, "spec.parallelism"),
        *_scaling(service),
        *_router(service),
    ]


def _model(model: ModelSpec) -> Iterator[UnsupportedFeature]:
    yield from _source(model.source, "spec.model.source")
    if model.secret_ref is not None:
        yield UnsupportedFeature(
            "spec.model.secretRef", "only loaders of hf:// and s3:// use it, which this release lacks"
        )
    if model.cache is not None:
        yield UnsupportedFeature(
            "spec.model.cache", "only loaders of hf:// and s3:// fill it, which this release lacks"
        )


def _source(source: ModelSource, path: str) -> Iterator[UnsupportedFeature]:
    if source.scheme in ("hf", "s3"):
        message = f"this release has no loader for {source.scheme}://: write file://, pvc:// or oci://"
        yield UnsupportedFeature(path, message, is_blocking=True)


def _engine(engine: EngineSpec) -> Iterator[UnsupportedFeature]:
    cache = engine.kv_cache
    if engine.quantization != "none":
        yield UnsupportedFeature(
            "spec.engine.quantization", f"{engine.quantization} is not supported yet: weights are used as stored"
        )
    if cache.dtype != "auto":
        yield UnsupportedFeature(
            "spec.engine.kvCache.dtype", f"{cache.dtype} is not supported yet: the KV cache has the model's dtype"
        )
    if cache.host_memory != Quantity("0"):
        yield UnsupportedFeature("spec.engine.kvCache.hostMemory", "there is no host tier yet: KV stays on the device")
    if cache.disk is not None:
        yield UnsupportedFeature("spec.engine.kvCache.disk", "there is no disk tier yet: KV stays on the device")
    if engine.speculative is not None and engine.speculative.model is not None:
        yield from _source(engine.speculative.model, "spec.engine.speculative.model")
    if engine.adapters is not None:
        yield UnsupportedFeature("spec.engine.adapters", "LoRA is not supported yet: only the base model is served")


def _parallelism(parallelism: ParallelismSpec, path: str) -> Iterator[UnsupportedFeature]:
    for name in ("tensor", "pipeline", "data"):
        degree = getattr(parallelism, name)
        if degree > 1:
            yield UnsupportedFeature(f"{path}.{name}", f"{degree} is not supported yet: each pod computes on one rank")
    if parallelism.expert:
        yield UnsupportedFeature(
            f"{path}.expert", "expert parallelism is not supported yet: each pod holds every expert"
        )


def _scaling(service: InferenceService) -> Iterator[UnsupportedFeature]:
    replicas = engine_replicas(service)
    if service.spec.autoscaling is not None:
        yield UnsupportedFeature("spec.autoscaling", f"not supported yet: the number of replicas stays {replicas}")
    split = service.spec.disaggregation
    if split is not None:
        yield UnsupportedFeature(
            "spec.disaggregation", f"not supported yet: {replicas} replicas do prefill and decode alike"
        )
        for name, role in (("prefill", split.prefill), ("decode", split.decode)):
            yield from _parallelism(role.parallelism, f"spec.disaggregation.{name}.parallelism")


def _router(service: InferenceService) -> Iterator[UnsupportedFeature]:
    if service.spec.router.mode == "gateway":
        yield UnsupportedFeature(
            "spec.router.mode",
            f"gateway is not supported yet: {router_replicas(service)} routers of the service's own run instead",
        )
    policy = service.spec.router.policy
    if policy not in SUPPORTED_POLICIES:
        yield UnsupportedFeature("spec.router.policy", f"{policy} is not supported yet: {DEFAULT_POLICY} decides")
