"""The InferenceService manifest as frozen dataclasses, one a group, fields in snake_case.

A field's default here is the default of the CRD under crds/ (tests/operator/api/test_drift.py compares both ways).
`None` means absent; what then holds is written beside the field. Bounds stand in `Annotated`, rules across fields in
rules.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from kvasir_operator.api.constraints import Bounds, Items, Key, Pattern
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.source import ModelSource

Count = Annotated[int, Bounds(1, 1_000_000_000)]
Replicas = Annotated[int, Bounds(0, 1000)]
Percent = Annotated[int, Bounds(1, 1000)]
ObjectName = Annotated[str, Pattern(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", 253)]
# What clients may put into the `model` field of a request.
ModelName = Annotated[str, Pattern(r"^[A-Za-z0-9]([A-Za-z0-9._/:-]*[A-Za-z0-9])?$", 128)]
# A number of pods, or a share of them as in a Deployment.
PodCount = Annotated[int | str, Bounds(0, 1000), Pattern(r"^[0-9]{1,3}%$", 4)]
AffinityObject = Mapping[str, Any]


@dataclass(frozen=True)
class SecretRef:
    """A Secret of the service's namespace."""

    name: ObjectName


@dataclass(frozen=True)
class ModelCache:
    """Where a loader keeps downloaded files; exactly one field is set."""

    claim: ObjectName | None = None
    host_path: Annotated[str, Pattern(r"^/.*$", 512)] | None = None
    size_limit: Quantity | None = None


@dataclass(frozen=True)
class ModelSpec:
    """What is served, and under which names."""

    source: ModelSource
    name: ModelName | None = None  # None: metadata.name
    aliases: Annotated[tuple[ModelName, ...], Items(32, unique=True)] = ()
    secret_ref: SecretRef | None = None
    cache: ModelCache | None = None  # None: an emptyDir where a loader needs one


@dataclass(frozen=True)
class DiskTier:
    """The third tier of the KV cache."""

    size_limit: Quantity


@dataclass(frozen=True)
class KVCacheSpec:
    """Block size and tiers of the KV cache."""

    block_size: Literal[8, 16, 32, 64] = 16  # tokens
    dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    prefix_caching: bool = True
    host_memory: Quantity = field(default=Quantity("0"))
    disk: DiskTier | None = None


@dataclass(frozen=True)
class SpeculativeSpec:
    """Speculative decoding; its presence switches it on."""

    method: Literal["ngram", "suffix", "draftModel", "medusa", "eagle", "eagle3"]
    model: ModelSource | None = None  # None for ngram and suffix only
    num_tokens: Annotated[int, Bounds(1, 64)] = 4


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter; clients ask for it by its name."""

    name: ModelName
    source: ModelSource


@dataclass(frozen=True)
class AdaptersSpec:
    """LoRA adapters, and how many of them fit at once."""

    max_rank: Annotated[int, Bounds(1, 512)] = 64
    max_loaded: Annotated[int, Bounds(1, 256)] = 8
    items: Annotated[tuple[Adapter, ...], Key("list"), Items(256, unique_by="name")] = ()


@dataclass(frozen=True)
class EngineSpec:
    """How the engine computes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "fp8", "int8", "int4", "auto"] = "none"
    max_model_len: Count | None = None  # tokens; None: what the model declares, cut to what fits
    max_num_seqs: Annotated[int, Bounds(1, 65536)] = 256
    # tokens; None: 8192 on CUDA, 2048 on CPU
    max_num_batched_tokens: Annotated[int, Bounds(1, 16_777_216)] | None = None
    memory_utilization: Annotated[float, Bounds(0.01, 1)] | None = (
        None  # None: 0.9 of a GPU, 0.5 of the memory limit on CPU
    )
    scheduling: Literal["fcfs", "priority", "fair"] = "fair"
    kv_cache: KVCacheSpec = field(default_factory=KVCacheSpec)
    speculative: SpeculativeSpec | None = None
    adapters: AdaptersSpec | None = None
    args: Annotated[tuple[Annotated[str, Pattern(None, 1024)], ...], Items(64)] = ()


@dataclass(frozen=True)
class ParallelismSpec:
    """Ranks of one replica."""

    tensor: Annotated[int, Bounds(1, 64)] = 1
    pipeline: Annotated[int, Bounds(1, 64)] = 1
    data: Annotated[int, Bounds(1, 64)] = 1
    expert: bool = False


NO_ACCELERATOR: Final = "none"
DEFAULT_ACCELERATOR: Final = "nvidia.com/gpu"


@dataclass(frozen=True)
class ResourcesSpec:
    """What one engine pod asks for; the accelerator's count follows from parallelism."""

    accelerator: Annotated[str, Pattern(r"^(none|[a-z0-9.-]+/[A-Za-z0-9._-]+)$", 253)] | None = (
        None  # None: nvidia.com/gpu, but none where engine.device is cpu
    )
    cpu: Quantity | None = None
    memory: Quantity | None = None
    shared_memory: Quantity | None = None  # None: the container runtime's own, commonly 64Mi


@dataclass(frozen=True)
class Toleration:
    """As in a pod."""

    key: Annotated[str, Pattern(None, 316)] | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: Annotated[str, Pattern(None, 63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Annotated[int, Bounds(0, 1_000_000_000)] | None = None


@dataclass(frozen=True)
class KeyRef:
    """One entry of a Secret or ConfigMap."""

    name: ObjectName
    key: Annotated[str, Pattern(r"^[-._a-zA-Z0-9]+$", 253)]
    optional: bool = False


@dataclass(frozen=True)
class FieldRef:
    """A field of the pod itself."""

    field_path: Annotated[str, Pattern(None, 256)]


@dataclass(frozen=True)
class EnvSource:
    """Where a variable's value comes from; exactly one field is set."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


@dataclass(frozen=True)
class EnvVar:
    """An environment variable of the engine."""

    name: Annotated[str, Pattern(r"^[A-Za-z_][A-Za-z0-9_]*$", 256)]
    value: Annotated[str, Pattern(None, 4096)] | None = None
    value_from: EnvSource | None = None


LabelMap = Annotated[
    Mapping[str, Annotated[str, Pattern(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", 63)]], Items(64)
]
TextMap = Annotated[Mapping[str, Annotated[str, Pattern(None, 4096)]], Items(64)]


@dataclass(frozen=True)
class PodSpec:
    """Bounded overrides, merged into every engine pod."""

    image: Annotated[str, Pattern(None, 512)] | None = None  # None: the operator's
    node_selector: LabelMap = field(default_factory=dict)
    tolerations: Annotated[tuple[Toleration, ...], Items(64)] = ()
    affinity: AffinityObject = field(default_factory=dict)  # the Kubernetes object, passed through
    topology_spread: Literal["auto", "none"] = "auto"
    priority_class_name: Annotated[str, Pattern(None, 253)] | None = None
    service_account_name: Annotated[str, Pattern(None, 253)] | None = None  # None: one of the service's own
    labels: LabelMap = field(default_factory=dict)
    annotations: TextMap = field(default_factory=dict)
    env: Annotated[tuple[EnvVar, ...], Items(64, unique_by="name")] = ()


@dataclass(frozen=True)
class SLO:
    """Latency guards (p90) of the autoscaler; None: not guarded."""

    time_to_first_token: Duration | None = None
    inter_token_latency: Duration | None = None


@dataclass(frozen=True)
class ScaleUp:
    """How fast replicas may be added."""

    stabilization: Duration = field(default=Duration("0s"))
    max_percent: Percent = 100


@dataclass(frozen=True)
class ScaleDown:
    """How fast replicas may be taken away."""

    stabilization: Duration = field(default=Duration("300s"))
    max_percent: Percent = 50


@dataclass(frozen=True)
class AutoscalingSpec:
    """Replicas by demand instead of by number."""

    max_replicas: Annotated[int, Bounds(1, 1000)]
    min_replicas: Replicas = 1  # 0 allows scale to zero
    target_kv_cache_usage: Annotated[float, Key("targetKVCacheUsage"), Bounds(0.05, 1)] = 0.75
    slo: SLO | None = None
    scale_to_zero_after: Duration = field(default=Duration("10m"))
    scale_up: ScaleUp = field(default_factory=ScaleUp)
    scale_down: ScaleDown = field(default_factory=ScaleDown)


@dataclass(frozen=True)
class DisaggregatedRole:
    """One of prefill and decode."""

    replicas: Replicas | None = None  # None: 1, unless autoscaling is set
    autoscaling: AutoscalingSpec | None = None
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    resources: ResourcesSpec | None = None


@dataclass(frozen=True)
class DisaggregationSpec:
    """Prefill and decode as roles of their own; its presence splits the service."""

    prefill: DisaggregatedRole
    decode: DisaggregatedRole
    remote_prefill_min_tokens: Annotated[int | Literal["auto"], Bounds(0, 1_000_000_000)] = "auto"


@dataclass(frozen=True)
class RouterResources:
    """What one router pod asks for."""

    cpu: Quantity = field(default=Quantity("1"))
    memory: Quantity = field(default=Quantity("512Mi"))


@dataclass(frozen=True)
class RouterSpec:
    """How requests reach the engines."""

    mode: Literal["dedicated", "gateway"] = "dedicated"
    replicas: Replicas | None = None  # dedicated only; None: 2
    policy: Literal["finishTime", "leastWork", "roundRobin", "powerOfTwo", "sessionAffinity"] = "finishTime"
    api_keys_secret_ref: SecretRef | None = None  # None: open
    max_queue_size: Annotated[int, Bounds(0, 1_000_000)] = 1000
    max_queue_wait: Duration = field(default=Duration("60s"))
    resources: RouterResources = field(default_factory=RouterResources)


@dataclass(frozen=True)
class RolloutSpec:
    """How new pods replace old ones."""

    max_surge: PodCount = 1
    max_unavailable: PodCount = 0
    drain_timeout: Duration = field(default=Duration("300s"))


@dataclass(frozen=True)
class MonitoringSpec:
    """Objects for a monitoring stack."""

    pod_monitor: Literal["auto", "none"] = "auto"


@dataclass(frozen=True)
class ServiceSpec:
    """`spec` of an InferenceService."""

    model: ModelSpec
    engine: EngineSpec = field(default_factory=EngineSpec)
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    resources: ResourcesSpec | None = None
    pod: PodSpec = field(default_factory=PodSpec)
    replicas: Replicas | None = None  # None: 1, unless autoscaling or disaggregation is set
    autoscaling: AutoscalingSpec | None = None
    disaggregation: DisaggregationSpec | None = None
    router: RouterSpec = field(default_factory=RouterSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    monitoring: MonitoringSpec = field(default_factory=MonitoringSpec)


@dataclass(frozen=True)
class InferenceService:
    """One manifest. `uid` and `generation` are the API server's; None in a file that was never applied."""

    name: str
    namespace: str
    spec: ServiceSpec
    uid: str | None = None
    generation: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The name clients use, then its aliases."""
        return (self.spec.model.name or self.name, *self.spec.model.aliases)

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name): what a reconcile pass is asked for."""
        return (self.namespace, self.name)
