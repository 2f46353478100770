"""What a manifest asks for and this release, or this cluster, does not act on; it becomes the `Degraded` condition.

Nothing is ignored in silence: a field that is neither turned into a child object or flag nor listed here is a bug, and
tests/operator/desired/test_nothing_is_ignored.py looks for one. And nothing starts that would crash, or would hold
devices without computing on them: such a feature is blocking, and its service gets no engine pods.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.api.engine_flags import ENGINE_FLAGS
from kvasir_operator.api.model import (
    AutoscalingSpec,
    DisaggregatedRole,
    DisaggregationSpec,
    EngineSpec,
    InferenceService,
    ModelSpec,
    RouterSpec,
    ServiceSpec,
)
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.engine_resources import accelerator

_PARTITION_FLAG: Final = "--pipeline-layer-partition"
# Each copy takes the next port, up to those of something else.
_MOST_EXCHANGING_COPIES: Final = min(
    labels.ENGINE_KV_TRANSFER_PORT - labels.ENGINE_KV_EVENTS_PORT,
    labels.ENGINE_KV_REPLAY_PORT - labels.ENGINE_KV_TRANSFER_PORT,
)
# Whose devices are not NVIDIA's: others (vGPUs, shares of GPUs) have domains of their own for those.
_OTHER_VENDORS: Final = (
    "amd.com", "amazonaws.com", "aws.amazon.com", "cambricon.com", "furiosa.ai", "google.com", "habana.ai",
    "huawei.com", "intel.com", "metax-tech.com", "mthreads.com", "qualcomm.com", "rebellions.ai", "tenstorrent.com",
)  # fmt: skip
_NOTHING_DOWNLOADED: Final = "nothing is downloaded: only hf:// and s3:// use it, so leave it out"


@dataclass(frozen=True)
class UnsupportedFeature:
    """`message` says what is asked for and what happens instead; `is_blocking` where no engine may start with it."""

    field_path: str
    message: str
    is_blocking: bool = False

    def __str__(self) -> str:
        return f"{self.field_path}: {self.message}"


def unsupported_features(
    service: InferenceService,
    has_gateway: bool = False,
    has_prometheus: bool = False,
    roles: Iterable[EngineRole] = (),
) -> list[UnsupportedFeature]:
    """In the manifest's order; empty where all of it is acted on.

    `has_gateway`: whether the installation has a shared router. `has_prometheus`: whether it reads one.
    `roles`: as they would run in a cluster.
    """
    spec = service.spec
    return [
        *_model(spec.model, spec.engine),
        *_engine(spec.engine),
        *(feature for role in roles for feature in (*_accelerator(role), *_unknown_flags(role))),
        *_kv_transfer(spec),
        *(() if has_prometheus else _scaling(spec)),
        *_router(spec.router, has_gateway),
    ]


def blocking(features: Iterable[UnsupportedFeature]) -> list[UnsupportedFeature]:
    """Those that keep engines from starting; engines may start where there is none."""
    return [feature for feature in features if feature.is_blocking]


def _blocking(path: str, message: str) -> UnsupportedFeature:
    return UnsupportedFeature(path, f"{message}; no engine is started", is_blocking=True)


def _model(model: ModelSpec, engine: EngineSpec) -> Iterator[UnsupportedFeature]:
    draft = None if engine.speculative is None else engine.speculative.model
    if model.source.is_downloaded or (draft is not None and draft.is_downloaded):
        return
    if model.secret_ref is not None:
        yield UnsupportedFeature("spec.model.secretRef", _NOTHING_DOWNLOADED)
    if model.cache is not None:
        yield UnsupportedFeature("spec.model.cache", _NOTHING_DOWNLOADED)


def _unknown_flags(role: EngineRole) -> Iterator[UnsupportedFeature]:
    """Named before the model is downloaded; an image of the user's own may know others."""
    owner = "spec" if role.name == "serve" else f"spec.disaggregation.{role.name}"
    for arg in role.engine.args if role.pod.image is None else ():
        flag = arg.partition("=")[0]
        if flag.startswith("--") and flag.partition(".")[0] not in ENGINE_FLAGS:  # a key of a JSON object may follow
            message = f"the engine of this release has no {flag} and ends at it: remove it"
            yield UnsupportedFeature(f"{owner}.engine.args", message)


def _engine(engine: EngineSpec) -> Iterator[UnsupportedFeature]:
    cache = engine.kv_cache
    if engine.quantization not in ("auto", "none"):
        yield _blocking(
            "spec.engine.quantization",
            f"{engine.quantization} is not supported yet, and without it the weights may not fit: write none",
        )
    if cache.dtype != "auto":
        yield UnsupportedFeature(
            "spec.engine.kvCache.dtype", f"{cache.dtype} is not supported yet: the KV cache has the model's dtype"
        )
    if cache.host_memory != Quantity("0"):
        yield UnsupportedFeature("spec.engine.kvCache.hostMemory", "there is no host tier yet: KV stays on the device")
    if cache.disk is not None:
        yield UnsupportedFeature("spec.engine.kvCache.disk", "there is no disk tier yet: KV stays on the device")
    if engine.adapters is not None:
        yield UnsupportedFeature("spec.engine.adapters", "LoRA is not supported yet: only the base model is served")


def _accelerator(role: EngineRole) -> Iterator[UnsupportedFeature]:
    named, owner = accelerator(role), "spec" if role.name == "serve" else f"spec.disaggregation.{role.name}"
    if named in role.resources.extra:
        message = f"the number of {named} follows from parallelism and maxDevices: leave it out"
        yield UnsupportedFeature(f"{owner}.resources.extra", message)
    if named is None or role.pod.image is not None:
        return
    domain = named.partition("/")[0]
    if any(domain == vendor or domain.endswith(f".{vendor}") for vendor in _OTHER_VENDORS):
        message = f"{named}, but no image of this release computes on it, and its pods would hold it and use CPUs"
        yield _blocking(
            f"{owner}.resources.accelerator", f"{message}: name NVIDIA's, or an image of your own in pod.image"
        )


def _kv_transfer(spec: ServiceSpec) -> Iterator[UnsupportedFeature]:
    """What the engine refuses beside `--kv-transfer-config`."""
    split = spec.disaggregation
    if split is None and not spec.engine.kv_transfer:
        return
    if not spec.engine.kv_cache.prefix_caching:
        message = "false, but pods find what others send in their prefix cache: leave it out"
        yield _blocking("spec.engine.kvCache.prefixCaching", message)
    exchanging = {"spec.parallelism": spec.parallelism}
    if split is not None:
        exchanging = {
            "spec.disaggregation.prefill.parallelism": split.prefill.parallelism,
            "spec.disaggregation.decode.parallelism": split.decode.parallelism,
        }
    for path, parallelism in exchanging.items():
        if parallelism.data > _MOST_EXCHANGING_COPIES:
            message = (
                f"{parallelism.data}, but the ports for exchanging KV are enough for {_MOST_EXCHANGING_COPIES} copies: "
                "write at most that, and more replicas"
            )
            yield _blocking(f"{path}.data", message)
    if split is not None:
        yield from _cuts(spec.engine, split)


def _cuts(engine: EngineSpec, split: DisaggregationSpec) -> Iterator[UnsupportedFeature]:
    """A stage takes KV from the stage of the same layers."""
    prefill, decode = split.prefill.parallelism.pipeline, split.decode.parallelism.pipeline
    if prefill != decode:
        yield _blocking(
            "spec.disaggregation.decode.parallelism.pipeline",
            f"{decode}, but {prefill} for prefill, and KV goes only between stages of the same layers: write the same",
        )
        return
    prefill_cut, decode_cut = (_layer_partition(engine, role) for role in (split.prefill, split.decode))
    if prefill_cut != decode_cut:
        yield _blocking(
            "spec.disaggregation.decode.engine.args",
            f"{_PARTITION_FLAG} is {decode_cut or 'left out'}, and for prefill {prefill_cut or 'left out'}, and KV "
            "goes only between stages of the same layers: write it in spec.engine.args, for both",
        )


def _layer_partition(engine: EngineSpec, role: DisaggregatedRole) -> str | None:
    """As the engine reads it: the last one counts."""
    own = () if role.engine is None else role.engine.args
    words = [word for arg in (*engine.args, *own) for word in arg.split("=", 1)]
    found = [value for flag, value in pairwise(words) if flag == _PARTITION_FLAG]
    return found[-1] if found else None


def _scaling(spec: ServiceSpec) -> Iterator[UnsupportedFeature]:
    yield from _autoscaling(spec.autoscaling, "spec.autoscaling")
    if spec.disaggregation is not None:
        yield from _autoscaling(spec.disaggregation.prefill.autoscaling, "spec.disaggregation.prefill.autoscaling")
        yield from _autoscaling(spec.disaggregation.decode.autoscaling, "spec.disaggregation.decode.autoscaling")


def _autoscaling(autoscaling: AutoscalingSpec | None, path: str) -> Iterator[UnsupportedFeature]:
    if autoscaling is not None:
        replicas = max(1, autoscaling.min_replicas)
        yield UnsupportedFeature(
            path,
            f"this operator reads no Prometheus (chart value prometheus.url): the number of replicas stays {replicas}",
        )


def _router(router: RouterSpec, has_gateway: bool) -> Iterator[UnsupportedFeature]:
    if router.mode == "gateway" and not has_gateway:
        yield _blocking(
            "spec.router.mode",
            "this installation has no gateway: set gateway.enabled in the chart's values, or write mode: dedicated",
        )
    if router.mode == "gateway" and router.probes is not None:
        message = "of a router of the service's own; the gateway's flags are chart value gateway.extraArgs"
        yield UnsupportedFeature("spec.router.probes", message)
