"""What is wrong with a configuration whatever the model and the device: refused with the flag's name before anything
starts."""

import math

from kvasir_runtime.config import (
    LOAD_TOPIC,
    CacheConfig,
    KvConnectorConfig,
    KvEventsConfig,
    ParallelConfig,
    RuntimeConfig,
    SpeculativeConfig,
)
from kvasir_runtime.errors import ConfigurationError

MAX_COUNT = 2**31 - 1
MAX_BYTES = 2**60
MAX_ROWS = 2**20
"""Of one step, for which arrays are made at the start."""
MAX_PROCESSES = 1024
"""Or threads."""
MAX_STEPS_AHEAD = 64
MAX_DRAFTS = 256
MAX_LOAD_HZ = 1000
MAX_BUFFERED = 10_000_000
"""Messages, of a replay and of a reader."""


def check_values(config: RuntimeConfig) -> None:
    """Raises ConfigurationError."""
    model, cache, scheduler, server = config.model, config.cache, config.scheduler, config.server
    parallel = config.parallel
    for flag, value, most in (
        ("--max-model-len", model.max_model_len, MAX_COUNT),
        ("--kv-cache-memory-bytes", cache.kv_cache_memory_bytes, MAX_BYTES),
        ("--num-gpu-blocks-override", cache.num_gpu_blocks_override, MAX_COUNT),
        ("--max-num-seqs", scheduler.max_num_seqs, MAX_ROWS),
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens, MAX_ROWS),
        ("--max-step-ms", scheduler.max_step_ms, math.inf),
        ("--steps-ahead", scheduler.steps_ahead, MAX_STEPS_AHEAD),
        ("--num-threads", config.execution.num_threads, MAX_PROCESSES),
        ("--tensor-parallel-size", parallel.tensor_parallel_size, MAX_PROCESSES),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size, MAX_PROCESSES),
        ("--data-parallel-size", parallel.data_parallel_size, MAX_PROCESSES),
        ("--nnodes", parallel.nnodes, MAX_PROCESSES),
        ("--api-server-count", server.api_server_count, MAX_PROCESSES),
        ("--max-n", server.max_n, MAX_COUNT),
        ("--max-request-sequences", server.max_request_sequences, MAX_COUNT),
        ("--max-sequences-in-flight", server.max_sequences_in_flight, MAX_COUNT),
        ("--max-connections", server.max_connections, MAX_COUNT),
        ("--max-connections-per-peer", server.max_connections_per_peer, MAX_COUNT),
        ("--max-body-bytes", server.max_body_bytes, MAX_BYTES),
    ):
        if value is not None:
            _check_between(flag, value, 1, most)
    for flag, number in (
        ("--max-logprobs", server.max_logprobs),
        ("--stall-seconds", server.stall_seconds),
        ("--shutdown-delay", server.shutdown_delay),
        ("--shutdown-timeout", server.shutdown_timeout),
    ):
        _check_at_least(flag, number, 0)
    for flag, port in (("--port", server.port), ("--master-port", config.parallel.master_port)):
        if not 0 <= port <= 65535:
            raise ConfigurationError(f"{flag} is {port}; ports go from 0 to 65535")
    _check_parallel(config.parallel)
    share = cache.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigurationError(f"--gpu-memory-utilization is {share:g}; it is a share, more than 0 and at most 1")
    _check_backend(server.structured_outputs_config.backend)
    if config.execution.speculative_config is not None:
        _check_speculative(config.execution.speculative_config)
    if cache.kv_events_config is not None:
        _check_kv_events(cache.kv_events_config)
        _check_kv_event_ports(cache.kv_events_config, config.parallel.data_parallel_size)
    if cache.kv_transfer_config is not None:
        _check_kv_transfer(cache.kv_transfer_config.kv_connector_extra_config, cache, config.parallel)


def _check_at_least(flag: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:  # written so that nan is refused
        raise ConfigurationError(f"{flag} is {value}; it must be at least {least}")


def _check_between(flag: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # written so that nan is refused
        allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ConfigurationError(f"{flag} is {value}; it must be {allowed}")


def _check_parallel(parallel: ParallelConfig) -> None:
    tensor, pipeline, nodes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.nnodes
    if tensor * pipeline * parallel.data_parallel_size % nodes:
        raise ConfigurationError(
            f"--nnodes is {nodes}, but --tensor-parallel-size {tensor} times --pipeline-parallel-size {pipeline} times "
            f"--data-parallel-size {parallel.data_parallel_size} ranks do not divide into so many equal runs; choose "
            "sizes whose product it divides"
        )
    partition = parallel.pipeline_layer_partition
    if partition is not None and (len(partition) != pipeline or min(partition) < 1):
        raise ConfigurationError(
            f"--pipeline-layer-partition is {','.join(map(str, partition))}, but --pipeline-parallel-size is "
            f"{pipeline}: write as many numbers, each at least 1"
        )
    if parallel.enable_expert_parallel and tensor == 1:
        raise ConfigurationError(
            "--enable-expert-parallel shares out experts among tensor ranks, but --tensor-parallel-size is 1; raise "
            "it, or leave the flag out"
        )
    if not 0 <= parallel.node_rank < nodes:
        raise ConfigurationError(f"--node-rank is {parallel.node_rank}; with --nnodes {nodes} it goes to {nodes - 1}")


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "guidance"):
        raise ConfigurationError(
            f"--structured-outputs-config: backend is {backend!r}; answers are held by guidance (llguidance) alone, "
            "since others take schemas without keeping to every keyword; write guidance or auto, or leave it out"
        )


def _check_speculative(speculative: SpeculativeConfig) -> None:
    flag = "--speculative-config"
    _check_between(f"{flag}: num_speculative_tokens", speculative.num_speculative_tokens, 1, MAX_DRAFTS)
    _check_between(f"{flag}: prompt_lookup_min", speculative.prompt_lookup_min, 1, MAX_COUNT)
    _check_between(
        f"{flag}: prompt_lookup_max", speculative.prompt_lookup_max, speculative.prompt_lookup_min, MAX_COUNT
    )
    needs_model = speculative.method not in ("ngram", "suffix")
    if needs_model and speculative.model is None:
        raise ConfigurationError(f'{flag}: the method {speculative.method} needs a model; name its folder as "model"')
    if not needs_model and speculative.model is not None:
        raise ConfigurationError(f'{flag}: the method {speculative.method} takes no model; leave "model" out')


def _check_kv_events(events: KvEventsConfig) -> None:
    flag = "--kv-events-config"
    _check_between(f"{flag}: buffer_steps", events.buffer_steps, 1, MAX_BUFFERED)
    _check_between(f"{flag}: hwm", events.hwm, 1, MAX_BUFFERED)
    _check_between(f"{flag}: load_hz", events.load_hz, 0, MAX_LOAD_HZ)
    if events.load_hz and not events.is_on:
        raise ConfigurationError(
            f'{flag}: load_hz is {events.load_hz:g}, but nothing is published; set "enable_kv_cache_events" to true'
        )
    for key, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigurationError(f"{flag}: {key} is {endpoint!r}; write tcp://ADDRESS:PORT or ipc://PATH")
    if events.endpoint == events.replay_endpoint:
        raise ConfigurationError(f"{flag}: endpoint and replay_endpoint are both {events.endpoint}; give each its own")
    if LOAD_TOPIC.startswith(events.topic) and events.topic:
        raise ConfigurationError(f"{flag}: topic {events.topic!r} also selects {LOAD_TOPIC}; choose another, or none")


def _check_kv_event_ports(events: KvEventsConfig, data_parallel_size: int) -> None:
    """Data-parallel rank r takes the ports that are r higher, so the two ports must lie so far apart."""
    if data_parallel_size == 1:
        return
    ports = []
    for key, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
        if endpoint is not None and endpoint.startswith("tcp://"):
            port = endpoint.rpartition(":")[2]
            if not port.isdecimal():
                raise ConfigurationError(f"--kv-events-config: {key} is {endpoint!r}; write a port, as tcp://*:5557")
            ports.append(int(port))
    if len(ports) == 2 and abs(ports[0] - ports[1]) < data_parallel_size:
        raise ConfigurationError(
            f"--kv-events-config: the ports {ports[0]} and {ports[1]} are too close for --data-parallel-size "
            f"{data_parallel_size}, whose ranks take the ports behind them; write ports that lie at least "
            f"{data_parallel_size} apart"
        )


def _check_kv_transfer(extra: KvConnectorConfig, cache: CacheConfig, parallel: ParallelConfig) -> None:
    flag = "--kv-transfer-config"
    num_ranks = parallel.data_parallel_size
    if num_ranks == 1:
        _check_between(f"{flag}: side_channel_port", extra.side_channel_port, 0, 65535)
    elif not 1 <= extra.side_channel_port <= 65536 - num_ranks:
        raise ConfigurationError(
            f"{flag}: side_channel_port is {extra.side_channel_port}; with --data-parallel-size {num_ranks}, whose "
            f"ranks take the ports behind it, it must be from 1 to {65536 - num_ranks}"
        )
    _check_between(f"{flag}: lease_seconds", extra.lease_seconds, 0.1, 86400)
    _check_between(f"{flag}: timeout_seconds", extra.timeout_seconds, 0.1, 86400)
    if not extra.side_channel_host or extra.side_channel_host in ("*", "0.0.0.0", "::"):
        raise ConfigurationError(
            f"{flag}: side_channel_host is {extra.side_channel_host!r}; other engines are told it, so write an "
            "address of this machine that they can reach"
        )
    if not cache.enable_prefix_caching:
        raise ConfigurationError(
            f"{flag} and --no-enable-prefix-caching exclude each other: what arrives is found in the prefix cache"
        )
