"""The runtime's configuration: small frozen groups, resolved once at start; the command line is derived from them.

Each field becomes a flag of its name (`max_num_seqs` -> `--max-num-seqs`), typed as vLLM users know it, and the text
under it becomes its help. Parts of the engine are handed the values they use, never the whole.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from kvasir_logging import LogFormat, LogLevel

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LOAD_TOPIC = "kvasir-load"
"""Of load reports, on the socket of the KV events."""


def option(help_text: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with the help of its flag."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """The JSON object of `--pooler-config`, with vLLM's keys; unknown ones are errors."""

    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = None
    """Of which tokens' hidden states a vector is the mean: the last, all, the first. None: as the checkpoint says."""
    use_activation: bool | None = None
    """Whether vectors get length 1, and scores become probabilities, unless a request says otherwise. None: as the
    checkpoint says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer); or ORG/NAME or "
        "hf://ORG/NAME[@REVISION] of a hub, or s3://BUCKET[/PREFIX], which is downloaded first"
    )
    download_dir: str = option("folder that downloaded models are kept in", default="~/.cache/kvasir/models")
    served_model_name: tuple[str, ...] = option(
        "names that clients use, the first is reported; default: the folder's name, or ORG/NAME", default=()
    )
    tokenizer: str | None = option("folder of the tokenizer; default: the model's", default=None)
    runner: Literal["auto", "generate", "pooling"] = option(
        "what prompts are for: generate continues them, pooling makes a vector of each (embeddings, scores, classes); "
        "auto: what the checkpoint is for",
        default="auto",
    )
    convert: Literal["auto", "embed", "classify"] = option(
        "which vector a pooling model makes: an embedding, or scores, which a generating model tells by its logits of "
        "yes and no; auto: what the checkpoint is for",
        default="auto",
    )
    pooler_config: PoolerConfig | None = option(
        'JSON: {"pooling_type": "LAST" | "MEAN" | "CLS", "use_activation": BOOL}; default: what the checkpoint says',
        default=None,
    )
    hf_overrides: dict[str, Any] | None = option(
        "JSON object that is read over config.json; default: nothing", default=None
    )
    chat_template: str | None = option("file with a Jinja chat template; default: the tokenizer's", default=None)
    tool_call_parser: str | None = option(
        "how the model writes calls of tools, by vLLM's name; none: they are text; default: what its template shows",
        default=None,
    )
    enable_auto_tool_choice: bool = option(
        "changes nothing: models may call tools wherever it is known how they write calls", default=False
    )
    reasoning_parser: str | None = option(
        "how the model writes its thoughts, by vLLM's name; none: they are text; default: what its template shows",
        default=None,
    )
    dtype: DType = option("of weights and activations; auto: what the checkpoint declares", default="auto")
    device: Device = option("auto: cuda when there is one", default="auto")
    max_model_len: int | None = option(
        "tokens of prompt and output; default: what the model declares, cut to what the KV cache can hold of one "
        "request",
        default=None,
    )
    seed: int | None = option("makes requests without a seed of their own repeatable; default: not", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The JSON object of `--kv-events-config`, with vLLM's keys; unknown ones are errors."""

    enable_kv_cache_events: bool = False
    """Off: no socket is opened, and the load is not reported either."""
    publisher: Literal["zmq", "null"] = "zmq"
    """null: as if off."""
    endpoint: str = "tcp://*:5557"
    """Where events are published; `*` is every address of the machine, IPv6 and IPv4."""
    replay_endpoint: str | None = None
    """Where readers ask for what they missed; None: nowhere."""
    buffer_steps: int = 10_000
    """Steps with events that can be replayed as they were; of earlier ones, the blocks that are still there."""
    hwm: int = 100_000
    """Messages that wait for a reader that is slow, before it misses some."""
    topic: str = ""
    load_hz: float = 0.0
    """Most load reports a second, under the topic `kvasir-load`; 0: none. Ours, not vLLM's."""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConnectorConfig:
    """`kv_connector_extra_config` of `--kv-transfer-config`: ours, not vLLM's."""

    side_channel_host: str = "127.0.0.1"
    """Address of this machine to listen on; other engines are told it, so it must be one that they can reach."""
    side_channel_port: int = 5600
    """Data-parallel rank r takes the port that is r higher. 0: any that is free, of an engine without such ranks."""
    revision: str = ""
    """Engines of different revisions exchange nothing."""
    checksums: bool = True
    """Of each block: sent with it, and compared with what came."""
    lease_seconds: float = 30.0
    """How long a prompt's blocks are kept for an engine that gives no sign of life."""
    timeout_seconds: float = 60.0
    """A pull of which nothing comes for so long is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """The JSON object of `--kv-transfer-config`, with vLLM's keys; unknown ones are errors."""

    kv_connector: Literal["NixlConnector"]
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    """kv_producer: computes prompts for others only; kv_consumer: takes them only."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose blocks do not come: its prompt is computed here, or it is answered with an
    error."""
    kv_connector_extra_config: KvConnectorConfig = field(default_factory=KvConnectorConfig)

    @property
    def can_produce(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def can_consume(self) -> bool:
        return self.kv_role != "kv_producer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    block_size: Literal[8, 16, 32, 64] = option("tokens of one KV-cache block", default=16)
    gpu_memory_utilization: float | None = option(
        "share of the device's memory (on CPU: of the memory limit) for weights and KV cache; default: 0.9 on CUDA, "
        "0.5 on CPU",
        default=None,
    )
    kv_cache_memory_bytes: int | None = option("bytes of the KV cache, instead of a share", default=None)
    num_gpu_blocks_override: int | None = option(
        "number of KV-cache blocks on any device, instead of a share", default=None
    )
    kv_cache_dtype: Literal["auto", "int8_per_token_head", "fp8_per_token_head"] = option(
        "type of the KV cache: the model's (auto), or int8 or fp8 (e4m3) with a float32 scale for each token and head, "
        "which only --attention-backend reference reads; layers that only draft keep the model's",
        default="auto",
    )
    enable_prefix_caching: bool = option("reuse the KV blocks of equal prompt prefixes", default=True)
    kv_events_config: KvEventsConfig | None = option(
        'JSON: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", '
        '"buffer_steps": N, "hwm": N, "topic": TEXT, "load_hz": HZ}; default: nothing is published',
        default=None,
    )
    kv_transfer_config: KvTransferConfig | None = option(
        'JSON: {"kv_connector": "NixlConnector", "kv_role": "kv_both" | "kv_producer" | "kv_consumer", '
        '"kv_load_failure_policy": "recompute" | "fail", "kv_connector_extra_config": {"side_channel_host": HOST, '
        '"side_channel_port": 5600, "revision": TEXT, "checksums": true, "lease_seconds": S, "timeout_seconds": S}}; '
        "default: no KV is exchanged with other engines",
        default=None,
    )
    kv_transfer_trust_clients: bool = option(
        "take kv_transfer_params from anyone, for routers of other makes, where nobody else reaches this engine: it "
        "connects to whom they name; default: from the router alone",
        default=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = option("requests in one step", default=256)
    max_num_batched_tokens: int | None = option(
        "token budget of one step; default: 8192 on CUDA, 2048 on CPU", default=None
    )
    max_step_ms: float = option(
        "time that a step aims at while anybody decodes: chunks of prompts are cut to what was measured to fit into it",
        default=150.0,
    )
    enable_chunked_prefill: bool = option("split prompts that do not fit into a step's budget", default=True)
    scheduling_policy: Literal["fcfs", "priority", "fair"] = option(
        "order of waiting requests: arrival, priority, or equal shares by tenant", default="fcfs"
    )
    priority_preemption_threshold: int = option(
        "with --scheduling-policy priority, a request that lacks a row or KV blocks takes them from running ones whose "
        "priority is worse by so much; 0: it waits for them",
        default=10,
    )
    async_scheduling: bool | None = option(
        "plan the next step while the current one runs; default: on CUDA only, where it costs no core", default=None
    )
    steps_ahead: int = option("steps planned ahead where that is on; P pipeline stages always plan P - 1", default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The JSON object of `--speculative-config`; unknown keys are errors."""

    method: Literal["ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3"]
    model: str | None = None
    """Folder of the draft model or the heads; None for ngram and suffix, which need none."""
    num_speculative_tokens: int = 4
    """Most drafts of a sequence in one step; fewer, down to none, where they do not pay."""
    prompt_lookup_min: int = 2
    """ngram: fewest tokens that must match."""
    prompt_lookup_max: int = 4
    """ngram: most tokens that are looked up."""
    adaptive: bool = True
    """Whether depth follows measured acceptance and cost; off: always num_speculative_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    attention_backend: Literal["auto", "reference", "cpu", "triton"] = option(
        "auto: triton on CUDA, cpu kernels on CPU", default="auto"
    )
    linear_path: Literal["auto", "torch", "fma", "dot", "amx"] = option(
        "what multiplies in linear layers; auto: on CPUs the fastest of our instructions (fma, dot, amx) in a short "
        "measurement, on GPUs a kernel of ours for few rows; torch: its library",
        default="auto",
    )
    batch_invariant: bool = option(
        "on GPUs compute linear layers such that an answer does not depend on what else is served, at some speed; "
        "on CPUs it never does",
        default=False,
    )
    speculative_config: SpeculativeConfig | None = option(
        'JSON: {"method": "ngram" | "suffix" | "draft_model" | "medusa" | "eagle" | "eagle3", "model": FOLDER, '
        '"num_speculative_tokens": K}; default: no speculation',
        default=None,
    )
    num_threads: int | None = option("threads of CPU kernels; default: the cores this process may use", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int = option("ranks that share every layer", default=1)
    pipeline_parallel_size: int = option("stages that share out the layers", default=1)
    pipeline_layer_partition: tuple[int, ...] | None = option(
        "layers of each stage, as 3,5; default: as equal as may be, the last stage with fewest", default=None
    )
    data_parallel_size: int = option("engines of equal weights behind this endpoint", default=1)
    enable_expert_parallel: bool = option("share out whole experts instead of cutting each", default=False)
    nnodes: int = option("nodes that hold the ranks of all engines, in equal runs", default=1)
    node_rank: int = option("which of them this is; 0 serves clients, the others their ranks and probes", default=0)
    master_addr: str = option("address of node 0, where ranks of several nodes meet", default="127.0.0.1")
    master_port: int = option("port of node 0 for the same", default=29500)
    collective_backend: Literal["auto", "gloo", "nccl", "shared_memory"] = option(
        "what carries collectives; auto: nccl on CUDA, shared_memory between CPU ranks of one node, else gloo",
        default="auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """The JSON object of `--structured-outputs-config`, with vLLM's keys; unknown ones are errors."""

    backend: str = "auto"
    """What holds answers to grammars: guidance (llguidance), which is what auto means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = option("address to listen on; :: is every one, IPv6 and IPv4", default="127.0.0.1")
    port: int = option("port to listen on", default=8000)
    api_server_count: int = option("processes for HTTP, tokenising and detokenising", default=1)
    api_key: str | None = option(
        "key that clients must send, on every route but the probes; also read from KVASIR_API_KEY", default=None
    )
    allowed_origins: tuple[str, ...] = option(
        "origins of pages whose scripts may use this server, * for all; no option: none", default=()
    )
    allowed_methods: tuple[str, ...] = option("HTTP methods that they may use", default=("*",))
    allowed_headers: tuple[str, ...] = option("request headers that they may send", default=("*",))
    allow_credentials: bool = option("whether they may send cookies and the like", default=False)
    max_logprobs: int = option("most alternatives that a client may ask for per token", default=20)
    max_n: int = option("most sequences that a client may ask for per prompt", default=128)
    max_request_sequences: int = option(
        "most sequences of one request, its prompts times the sequences of each", default=2048
    )
    max_sequences_in_flight: int = option(
        "most sequences that run or wait; requests beyond are answered with 503", default=16384
    )
    max_connections: int = option("most connections of one API process; idle ones make way", default=4096)
    max_connections_per_peer: int = option(
        "the same of one IPv4 address or IPv6 /64; a router sends up to 512 at once",
        default=2048,
    )
    max_body_bytes: int = option("largest request body; more is answered with 413", default=8 * 1024 * 1024)
    response_store_bytes: int = option(
        "how much is kept of responses (/v1/responses) for those that go on from them; the oldest are dropped first",
        default=64 * 1024 * 1024,
    )
    drop_client_header: bool = option(
        "drop the line that coding assistants put before the system text of /v1/messages (x-anthropic-billing-header): "
        "it differs with each request, so that no prefix is found in the cache",
        default=False,
    )
    enable_tokenizer_info_endpoint: bool = option(
        "serve GET /tokenizer_info: what the model's tokenizer_config.json says, with its chat template", default=False
    )
    structured_outputs_config: StructuredOutputsConfig = option(
        'JSON: {"backend": "auto" | "guidance"}; changes nothing: there is one backend',
        default=StructuredOutputsConfig(),
    )
    stall_seconds: float = option(
        "/health fails when work is pending and no step has finished for so long", default=60.0
    )
    shutdown_delay: float = option(
        "after SIGTERM the server serves on, each answer its connection's last, until nothing was asked for so many "
        "seconds: as long as what stands in front of it takes to send elsewhere",
        default=0.5,
    )
    shutdown_timeout: float = option(
        "seconds after SIGTERM in which all must have ended; in their second half new requests get 503", default=300.0
    )
    log_level: LogLevel = option("least severe level logged", default="info")
    log_format: LogFormat = option("lines of text, or an object of JSON a message", default="text")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """All of it, as the command line gave it."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
