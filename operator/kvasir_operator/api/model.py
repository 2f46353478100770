"""The InferenceService manifest as frozen dataclasses, one a group, fields in snake_case.

The CRD under crds/ and docs/reference are generated from these classes (`make generate`): a field's docstring is its
description there, its default the schema's. `None` means absent. Bounds stand in `Annotated`, rules across fields in
rules.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from kvasir_operator.api.fields import Bounds, Items, Key, Pattern
from kvasir_operator.api.pod_objects import AffinityObject, SecurityContextObject
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.source import ModelSource

Count = Annotated[int, Bounds(1, 1_000_000_000)]
Replicas = Annotated[int, Bounds(0, 1000)]
ObjectName = Annotated[str, Pattern(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", 253)]
# What clients may put into the `model` field of a request.
ModelName = Annotated[str, Pattern(r"^[A-Za-z0-9]([A-Za-z0-9._/:-]*[A-Za-z0-9])?$", 128)]
# A number of pods, or a share of them as in a Deployment.
PodCount = Annotated[int | str, Bounds(0, 1000), Pattern(r"^[0-9]{1,3}%$", 4)]
PodShare = Annotated[int | str, Bounds(0, 1000), Pattern(r"^(100|[0-9]{1,2})%$", 4)]
EngineArgs = Annotated[tuple[Annotated[str, Pattern(None, 1024)], ...], Items(64)]
PROFILE_NAME: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
LabelMap = Annotated[
    Mapping[str, Annotated[str, Pattern(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", 63)]], Items(64)
]
TextMap = Annotated[Mapping[str, Annotated[str, Pattern(None, 4096)]], Items(64)]


@dataclass(frozen=True)
class SecretRef:
    """A Secret of the service's namespace."""

    name: ObjectName
    """Its name."""


@dataclass(frozen=True)
class ModelCache:
    """Where downloaded models are kept, each in a folder of its own; exactly one field is set."""

    claim: ObjectName | None = None
    """PersistentVolumeClaim; several services may share one."""
    host_path: Annotated[str, Pattern(r"^/.*$", 512)] | None = None
    """Folder of the node that is there and that pods may write."""
    size_limit: Quantity | None = None
    """Size of an emptyDir."""


@dataclass(frozen=True)
class ModelSpec:
    """What is served, and under which names."""

    source: ModelSource
    """hf://ORG/NAME[@REVISION] or s3://BUCKET[/PREFIX] (downloaded into the cache), pvc://CLAIM[/PATH], oci://IMAGE
    (image volume) or file:///PATH (hostPath)."""
    name: ModelName | None = None
    """Name that clients use; metadata.name where absent."""
    aliases: Annotated[tuple[ModelName, ...], Items(32, unique=True)] = ()
    """Further names for the same model."""
    secret_ref: SecretRef | None = None
    """Secret with HF_TOKEN, AWS_ACCESS_KEY_ID, ...; environment of the loader only."""
    cache: ModelCache | None = None
    """Where downloads of hf:// and s3:// are kept, exactly one field set; an emptyDir where absent."""


@dataclass(frozen=True)
class DiskTier:
    """Third tier of the KV cache; none where absent. Not acted on yet."""

    size_limit: Quantity
    """Space on the node's disk."""


@dataclass(frozen=True)
class KVCacheSpec:
    """Blocks and tiers of the KV cache."""

    block_size: Literal[8, 16, 32, 64] = 16
    """Tokens of one block."""
    dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Of cached keys and values; auto is the model's. Not acted on yet: the others give the model's too."""
    prefix_caching: bool = True
    """Reuse blocks of equal prompt prefixes."""
    host_memory: Quantity = field(default=Quantity("0"))
    """Second tier, in the host's memory: swap and offload; 0 is none. Not acted on yet."""
    disk: DiskTier | None = None


@dataclass(frozen=True)
class SpeculativeSpec:
    """Speculative decoding; its presence switches it on."""

    method: Literal["ngram", "suffix", "draftModel", "medusa", "eagle", "eagle3"]
    """What drafts."""
    model: ModelSource | None = None
    """The drafting model or heads, as model.source; not for ngram and suffix, required for the others."""
    num_tokens: Annotated[int, Bounds(1, 64)] = 4
    """Most tokens drafted at once; the engine goes lower where acceptance does not pay."""


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter."""

    name: ModelName
    """Name that clients use."""
    source: ModelSource
    """Its files, as model.source."""


@dataclass(frozen=True)
class AdaptersSpec:
    """LoRA adapters, loaded and unloaded without a restart. Not acted on yet: only the base model is served."""

    max_rank: Annotated[int, Bounds(1, 512)] = 64
    """Largest rank of an adapter."""
    max_loaded: Annotated[int, Bounds(1, 256)] = 8
    """Adapters on the device at once; the rest waits in host memory."""
    items: Annotated[tuple[Adapter, ...], Key("list"), Items(256, unique_by="name")] = ()
    """The adapters; clients ask for one by its name."""


@dataclass(frozen=True)
class EngineSpec:
    """How the engine computes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the model is computed; auto is cuda where an accelerator of NVIDIA's is asked for. Where a claim gives the
    GPU (resources.claims), write cuda: with auto an engine that cannot use it computes on the CPU in silence."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations; auto is what the checkpoint declares."""
    quantization: Literal["auto", "none", "fp8", "int8", "int4"] = "auto"
    """Of weights. Not acted on yet: auto is none, with fp8, int8 and int4 no engine is started, and an engine ends on a
    checkpoint that declares one (AWQ, GPTQ, FP8, compressed-tensors)."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer; where absent, what the model declares, cut to what fits."""
    max_num_seqs: Annotated[int, Bounds(1, 65536)] = 256
    """Requests in one step."""
    max_num_batched_tokens: Annotated[int, Bounds(1, 16_777_216)] | None = None
    """Token budget of one step; where absent, 8192 on CUDA and 2048 on CPU."""
    memory_utilization: Annotated[float, Bounds(0.01, 1)] | None = None
    """Share of the device (on CPU, of the memory limit) for weights and KV cache; where absent, 0.9 of a GPU and 0.5 on
    CPU."""
    scheduling: Literal["fcfs", "priority", "fair"] = "fair"
    """Order of waiting requests; fair gives equal shares to tenants."""
    kv_cache: KVCacheSpec = field(default_factory=KVCacheSpec)
    kv_transfer: bool = False
    """Experimental. Pods of a revision exchange KV blocks: one fetches a prefix that another has cached where that is
    faster than computing it, and one that drains hands running requests over. With disaggregation pods of either role
    fetch from both; from prefill to decode KV goes in any case."""
    speculative: SpeculativeSpec | None = None
    adapters: AdaptersSpec | None = None
    args: EngineArgs = ()
    """Further engine flags, as typed on the command line; not those that a field sets."""


@dataclass(frozen=True)
class EngineOverrides:
    """What a role sets differently from spec.engine; absent fields are as there.

    What shapes KV blocks (dtype, quantization, block size, maxModelLen) is the same on both sides of a transfer.
    """

    max_num_seqs: Annotated[int, Bounds(1, 65536)] | None = None
    """Requests in one step."""
    max_num_batched_tokens: Annotated[int, Bounds(1, 16_777_216)] | None = None
    """Token budget of one step."""
    memory_utilization: Annotated[float, Bounds(0.01, 1)] | None = None
    """Share of the device for weights and KV cache."""
    scheduling: Literal["fcfs", "priority", "fair"] | None = None
    """Order of waiting requests."""
    args: EngineArgs = ()
    """Further engine flags, after those of spec.engine."""


@dataclass(frozen=True)
class ParallelismSpec:
    """Ranks of one replica."""

    tensor: Annotated[int, Bounds(1, 64)] = 1
    """Ranks that share each layer."""
    pipeline: Annotated[int, Bounds(1, 64)] = 1
    """Ranges of layers, each computed by pods of its own: with more than 1 a replica is a group of pods, which start,
    fail and go together."""
    data: Annotated[int, Bounds(1, 64)] = 1
    """Copies of the model in one replica, behind one endpoint; they share its pods as far as maxDevices allows."""
    expert: bool = False
    """Spread the experts of a mixture over the ranks."""


NO_ACCELERATOR: Final = "none"
DEFAULT_ACCELERATOR: Final = "nvidia.com/gpu"


@dataclass(frozen=True)
class ResourceClaim:
    """A claim of dynamic resource allocation, passed through; exactly one of the two names is set."""

    name: Annotated[str, Pattern(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", 63)]
    """Of the claim within the pod."""
    resource_claim_name: ObjectName | None = None
    """ResourceClaim that all pods share."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate from which each pod gets a claim of its own."""


@dataclass(frozen=True)
class ResourcesSpec:
    """What one engine pod asks for; the accelerator's count follows from parallelism."""

    profile: Annotated[str, Pattern(PROFILE_NAME, 63)] | None = None
    """A profile of the installation (chart value profiles): nodes, tolerations, image and sizes; what is written here
    wins."""
    accelerator: Annotated[str, Pattern(r"^(none|[a-z0-9.-]+/[A-Za-z0-9._-]+)$", 253)] | None = None
    """Resource name of the accelerator, or none; where absent, none for device cpu, else nvidia.com/gpu."""
    max_devices: Annotated[int, Bounds(1, 64)] | None = None
    """Most devices, or on CPUs ranks, of one pod: a larger tensor degree makes a group of pods with so many each, and
    copies of the model that do not fit into one pod make one as well."""
    cpu: Quantity | None = None
    """Cores, requested and limited; where absent, by the accelerators' count."""
    cpu_limit: Quantity | None = None
    """Cores at most, where that is to be more than is requested."""
    memory: Quantity | None = None
    """Host memory, requested and limited; where absent, by the accelerators' count."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm; where absent, by the pod's tensor ranks."""
    extra: Annotated[Mapping[str, Quantity], Items(16)] = field(default_factory=dict)
    """Further resources: rdma/ib, vpc.amazonaws.com/efa, hugepages-2Mi, ephemeral-storage, ..."""
    claims: Annotated[tuple[ResourceClaim, ...], Items(16, unique_by="name")] = ()
    """Claims of dynamic resource allocation, passed through. For one that gives a GPU write accelerator none and
    engine.device cuda: what a claim gives is not known here."""


@dataclass(frozen=True)
class Toleration:
    """As in a pod."""

    key: Annotated[str, Pattern(None, 316)] | None = None
    """Taint's key; all where absent."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """How key and value match."""
    value: Annotated[str, Pattern(None, 63)] | None = None
    """Taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint's effect; all where absent."""
    toleration_seconds: Annotated[int, Bounds(0, 1_000_000_000)] | None = None
    """How long NoExecute is tolerated; for ever where absent."""


@dataclass(frozen=True)
class KeyRef:
    """One entry of a Secret or ConfigMap."""

    name: ObjectName
    """Of the Secret or ConfigMap."""
    key: Annotated[str, Pattern(r"^[-._a-zA-Z0-9]+$", 253)]
    """The entry."""
    optional: bool = False
    """Start without it."""


@dataclass(frozen=True)
class FieldRef:
    """A field of the pod itself."""

    field_path: Annotated[str, Pattern(None, 256)]
    """Such as status.podIP."""


@dataclass(frozen=True)
class EnvSource:
    """Where a variable's value comes from; exactly one field is set."""

    secret_key_ref: KeyRef | None = None
    """One entry of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """One entry of a ConfigMap."""
    field_ref: FieldRef | None = None


@dataclass(frozen=True)
class EnvVar:
    """One environment variable."""

    name: Annotated[str, Pattern(r"^[A-Za-z_][A-Za-z0-9_]*$", 256)]
    """Its name."""
    value: Annotated[str, Pattern(None, 4096)] | None = None
    """Its value."""
    value_from: EnvSource | None = None


@dataclass(frozen=True)
class ObjectRef:
    """An object of the service's namespace."""

    name: ObjectName
    """Its name."""


@dataclass(frozen=True)
class PodVolume:
    """Files mounted read-only (CA bundles, templates); exactly one of configMap, secret and claim is set."""

    mount_path: Annotated[str, Pattern(r"^/.*$", 512)]
    """Folder in the container."""
    config_map: ObjectRef | None = None
    """ConfigMap whose entries are the files."""
    secret: ObjectRef | None = None
    """Secret whose entries are the files."""
    claim: ObjectRef | None = None
    """PersistentVolumeClaim."""


@dataclass(frozen=True)
class PodSpec:
    """Bounded overrides, merged into every pod of a role."""

    image: Annotated[str, Pattern(None, 512)] | None = None
    """Image of the container; the operator's where absent."""
    node_selector: LabelMap = field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Items(64)] = ()
    """Taints that the pods tolerate."""
    affinity: AffinityObject = field(default_factory=dict)
    """The Kubernetes object, passed through."""
    topology_spread: Literal["auto", "none"] | None = None
    """auto, which holds where absent, spreads pods over nodes, then zones, where that is possible."""
    priority_class_name: Annotated[str, Pattern(None, 253)] | None = None
    """PriorityClass of the pods."""
    service_account_name: Annotated[str, Pattern(None, 253)] | None = None
    """ServiceAccount of the pods; one of the service's own where absent."""
    runtime_class_name: Annotated[str, Pattern(None, 253)] | None = None
    """RuntimeClass of the pods."""
    scheduler_name: Annotated[str, Pattern(None, 253)] | None = None
    """Scheduler of the pods."""
    image_pull_secrets: Annotated[tuple[ObjectRef, ...], Items(16, unique_by="name")] = ()
    """Secrets for pulling images, besides the installation's."""
    security_context: SecurityContextObject = field(default_factory=dict)
    """The Kubernetes object, merged over ours; null leaves a field out (runAsUser: null leaves ids to OpenShift). An
    update by client-side apply drops nulls: use kubectl apply --server-side."""
    volumes: Annotated[tuple[PodVolume, ...], Items(16, unique_by="mount_path")] = ()
    """Files of ConfigMaps, Secrets and claims, mounted read-only."""
    labels: LabelMap = field(default_factory=dict)
    """Further labels of the pods."""
    annotations: TextMap = field(default_factory=dict)
    """Annotations of the pods."""
    env: Annotated[tuple[EnvVar, ...], Items(64, unique_by="name")] = ()
    """Environment of the container."""


@dataclass(frozen=True)
class SLO:
    """Latency guards (p90)."""

    time_to_first_token: Duration | None = None
    """Such as 500ms; not guarded where absent."""
    inter_token_latency: Duration | None = None
    """Such as 50ms; not guarded where absent."""


@dataclass(frozen=True)
class ScalingPolicy:
    """At most so many pods, or so many percent of them, in a period; as in a HorizontalPodAutoscaler."""

    type: Literal["Pods", "Percent"]
    """What value counts."""
    value: Annotated[int, Bounds(1, 1000)]
    """Most that may be added or taken away in a period."""
    period_seconds: Annotated[int, Bounds(1, 1800)]
    """Length of the period."""


@dataclass(frozen=True)
class ScalingRules:
    """One direction of scaling; as in a HorizontalPodAutoscaler."""

    stabilization_window_seconds: Annotated[int, Bounds(0, 3600)] | None = None
    """How long demand must have been so; where absent, 0 up, and down as long as a start or a lull takes, 60 to 600."""
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    """Which of several policies holds; Disabled stops this direction."""
    policies: Annotated[tuple[ScalingPolicy, ...], Items(8)] = ()
    """How fast; where absent, 100 percent in 15 s up and 50 percent in 60 s down."""


@dataclass(frozen=True)
class ScalingBehavior:
    """How fast replicas are added and taken away; as in a HorizontalPodAutoscaler."""

    scale_up: ScalingRules = field(default_factory=ScalingRules)
    """How fast replicas are added."""
    scale_down: ScalingRules = field(default_factory=ScalingRules)
    """How fast replicas are taken away."""


@dataclass(frozen=True)
class AutoscalingSpec:
    """Replicas by demand. Not together with replicas."""

    max_replicas: Annotated[int, Bounds(1, 1000)]
    """Most replicas."""
    min_replicas: Replicas = 1
    """Fewest replicas; 0 allows scale to zero."""
    target_kv_cache_usage: Annotated[float, Key("targetKVCacheUsage"), Bounds(0.05, 1)] = 0.75
    """Share of KV blocks in use that scaling aims at."""
    slo: SLO | None = None
    scale_to_zero_after: Duration = field(default=Duration("10m"))
    """Idle time before the last replica goes, where minReplicas is 0."""
    behavior: ScalingBehavior = field(default_factory=ScalingBehavior)


@dataclass(frozen=True)
class DisaggregatedRole:
    """One of prefill and decode."""

    replicas: Replicas | None = None
    """Number of pods, or groups of them; 1 where absent. Not together with autoscaling."""
    autoscaling: AutoscalingSpec | None = None
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    """Ranks of one replica. KV goes from a stage to that of the same layers: both roles need the same pipeline."""
    resources: ResourcesSpec | None = None
    pod: PodSpec | None = None
    """Bounded overrides, over those of spec.pod."""
    engine: EngineOverrides | None = None


@dataclass(frozen=True)
class DisaggregationSpec:
    """Prefill and decode as roles of their own; its presence splits the service.

    Without a ready prefill pod decode pods compute prompts too.
    """

    prefill: DisaggregatedRole
    """Pods that compute prompts."""
    decode: DisaggregatedRole
    """Pods that generate."""
    remote_prefill_min_tokens: Annotated[int | Literal["auto"], Bounds(0, 1_000_000_000)] = "auto"
    """Uncached tokens from which prefill is remote; auto lets the router's cost decide."""


@dataclass(frozen=True)
class RouterResources:
    """What one router pod asks for."""

    cpu: Quantity | None = None
    """Cores requested; where absent, the installation's (chart value podDefaults), else 250m."""
    memory: Quantity | None = None
    """Memory, requested and limited; where absent, the installation's, else 512Mi."""
    cpu_limit: Quantity | None = None
    """Cores at most, as a ResourceQuota of limits.cpu wants it; where absent, the installation's, else none."""


@dataclass(frozen=True)
class RouterService:
    """The Service that clients reach."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """As in a Service."""
    annotations: TextMap = field(default_factory=dict)
    """Annotations of the Service, such as a cloud's load balancer reads."""


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may ask of one router pod; not limited where absent."""

    tokens_per_minute: Count | None = None
    """Prompt tokens, in bursts of as many; more get 429 with Retry-After."""
    max_in_flight: Annotated[int, Bounds(1, 1_000_000)] | None = None
    """Requests at engines at once; more wait in the queue."""


@dataclass(frozen=True)
class RouterProbes:
    """When the router takes an engine for busy, and when for hung."""

    timeout_seconds: Annotated[int, Bounds(1, 600)] | None = None
    """Longest time for a probe's answer; 2 where absent."""
    failure_threshold: Annotated[int, Bounds(1, 1000)] | None = None
    """Probes without an answer, one a second, after which an engine gets no new requests; 3 where absent."""
    hung_after_seconds: Annotated[int, Bounds(1, 86400)] | None = None
    """An engine that takes connections and sends no byte for so long is hung: its requests go to others that can take
    them; 30 where absent."""


@dataclass(frozen=True)
class RouterSpec:
    """How requests reach the engines."""

    mode: Literal["dedicated", "gateway"] = "dedicated"
    """dedicated is a router of this service's own; gateway is the installation's shared one (chart value
    gateway.enabled), which serves it by its model names."""
    replicas: Replicas | None = None
    """Router pods, for mode dedicated only; 2 where absent."""
    policy: Literal["finishTime", "roundRobin", "sessionAffinity"] = "finishTime"
    """How a replica is chosen."""
    api_keys_secret_ref: SecretRef | None = None
    """Secret with a tenant's name as each entry's key and its API keys, one a line, as value; open where absent. For
    mode dedicated only: the gateway has its own (chart value gateway.apiKeysSecret)."""
    tenant_limits: TenantLimits | None = None
    """Limits to each tenant of apiKeysSecretRef; none where absent."""
    pod: PodSpec = field(default_factory=PodSpec)
    """Bounded overrides, merged into every router pod; for mode dedicated only."""
    service: RouterService = field(default_factory=RouterService)
    """The Service that clients reach; for mode dedicated only."""
    probes: RouterProbes | None = None
    """When an engine that does not answer is left alone; for mode dedicated only, the gateway has flags (chart value
    gateway.extraArgs)."""
    max_queue_size: Annotated[int, Bounds(0, 1_000_000)] = 1000
    """Requests held; more get 429 with Retry-After."""
    max_queue_wait: Duration = field(default=Duration("60s"))
    """Held longer get 503 with Retry-After; also bounds the wait while scaling from zero."""
    sse_keepalive_interval: Duration = field(default=Duration("20s"))
    """After so long without a byte a stream gets a comment, before its first token behind a head with status 200, so
    that no load balancer takes its connection for idle; 0s is never. For mode dedicated only."""
    resources: RouterResources = field(default_factory=RouterResources)
    """What one router pod asks for; for mode dedicated only."""


@dataclass(frozen=True)
class CanarySpec:
    """A share of the requests for the new revision until it may go on; straight on where absent."""

    weight: Annotated[int, Bounds(1, 99)]
    """Percentage of the requests that the new revision gets."""
    pause: bool = True
    """Stay at this share; false lets the rollout go on."""


@dataclass(frozen=True)
class RolloutSpec:
    """How pods of a new revision replace those of the old one."""

    max_surge: PodCount = 1
    """Pods above the wanted number, as number or percentage, counted over a role."""
    max_unavailable: PodShare = 0
    """Pods below the wanted number, as number or percentage, counted over a role."""
    drain_timeout: Duration = field(default=Duration("300s"))
    """How long a pod that is going away may finish its requests."""
    drain_delay: Duration = field(default=Duration("10s"))
    """How long nobody must have asked a router that is going away before it closes; load balancers send on so long."""
    history_limit: Annotated[int, Bounds(0, 20)] = 2
    """Former revisions kept at zero for a rollback."""
    canary: CanarySpec | None = None


@dataclass(frozen=True)
class MonitoringSpec:
    """Objects for a monitoring stack."""

    pod_monitor: Literal["auto", "none"] = "auto"
    """auto lets the chart's PodMonitors, made where the Prometheus operator's CRDs exist, scrape the service's pods;
    none keeps these pods out of them."""


@dataclass(frozen=True)
class ServiceSpec:
    """What is wanted."""

    model: ModelSpec
    engine: EngineSpec = field(default_factory=EngineSpec)
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    resources: ResourcesSpec | None = None
    pod: PodSpec = field(default_factory=PodSpec)
    """Bounded overrides, merged into every engine pod."""
    replicas: Replicas = 1
    """Number of engine pods, or groups of them. Left out with autoscaling and disaggregation."""
    autoscaling: AutoscalingSpec | None = None
    disaggregation: DisaggregationSpec | None = None
    router: RouterSpec = field(default_factory=RouterSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    suspend: bool = False
    """Take all pods away, router and engines, and keep the manifest."""
    monitoring: MonitoringSpec = field(default_factory=MonitoringSpec)


@dataclass(frozen=True)
class InferenceService:
    """One model, served behind an OpenAI-compatible endpoint.

    `uid` is the API server's; None in a file that was never applied.
    """

    name: str
    namespace: str
    spec: ServiceSpec
    uid: str | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The name clients use, then its aliases."""
        return (self.spec.model.name or self.name, *self.spec.model.aliases)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model, then of its adapters: all that clients may ask for."""
        adapters = () if self.spec.engine.adapters is None else self.spec.engine.adapters.items
        return (*self.model_names, *(adapter.name for adapter in adapters))

    @property
    def is_behind_gateway(self) -> bool:
        """Whether the installation's gateway serves it, and no router of its own."""
        return self.spec.router.mode == "gateway"
