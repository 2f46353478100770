"""Values that cannot work are told before the model is looked at."""

import pytest

from kvasir_runtime.config_checks import check_values
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.flags import Parser, add_flags, config_from


def check(*arguments: str) -> None:
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser)
    check_values(config_from(parser.parse_all(["folder", *arguments])))


@pytest.mark.parametrize(
    ("flag", "wrong", "right"),
    [
        ("--max-num-batched-tokens", "0", "1"),
        ("--max-num-seqs", "0", "1"),
        ("--max-model-len", "-1", "1"),
        ("--kv-cache-memory-bytes", "-5", "1"),
        ("--num-gpu-blocks-override", "0", "1"),
        ("--steps-ahead", "0", "1"),
        ("--num-threads", "0", "1"),
        ("--api-server-count", "0", "1"),
        ("--max-n", "0", "1"),
        ("--max-request-sequences", "0", "1"),
        ("--max-sequences-in-flight", "0", "1"),
        ("--max-connections", "0", "1"),
        ("--max-connections-per-peer", "0", "1"),
        ("--max-body-bytes", "0", "1"),
        ("--max-num-batched-tokens", str(2**20 + 1), str(2**20)),
        ("--max-num-seqs", str(10**30), str(2**20)),
        ("--num-gpu-blocks-override", str(2**31), str(2**31 - 1)),
        ("--kv-cache-memory-bytes", str(10**30), str(2**60)),
        ("--steps-ahead", "65", "64"),
        ("--num-threads", "1025", "1024"),
        ("--api-server-count", str(10**30), "1024"),
        ("--data-parallel-size", str(10**30), "1024"),
        ("--max-logprobs", "-1", "0"),
        ("--stall-seconds", "nan", "0"),
        ("--shutdown-timeout", "-0.5", "0"),
        ("--shutdown-delay", "-0.5", "0"),
        ("--port", "65536", "65535"),
        ("--gpu-memory-utilization", "0", "0.01"),
        ("--gpu-memory-utilization", "1.01", "1"),
        ("--gpu-memory-utilization", "nan", "1"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused_by_its_flag_and_the_bound_itself_taken(flag, wrong, right):
    with pytest.raises(ConfigurationError, match=f"^{flag} is "):
        check(f"{flag}={wrong}")
    check(f"{flag}={right}")


@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_another_backend_of_structured_outputs_is_refused_by_name(backend):
    with pytest.raises(ConfigurationError, match=f"backend is '{backend}'; answers are held by guidance"):
        check("--structured-outputs-config.backend", backend)
    for own in ("auto", "guidance"):
        check("--structured-outputs-config.backend", own)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0; it must be from 1 to 256"),
        ('{"method": "ngram", "prompt_lookup_min": 0}', "prompt_lookup_min is 0"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "prompt_lookup_max is 4; it must be from 5 to"),
        ('{"method": "eagle"}', "the method eagle needs a model"),
        ('{"method": "suffix", "model": "folder"}', "the method suffix takes no model"),
    ],
)
def test_a_speculative_config_that_cannot_work_is_refused(config, message):
    with pytest.raises(ConfigurationError, match=message):
        check("--speculative-config", config)


@pytest.mark.parametrize("method", ["draft_model", "medusa", "eagle", "eagle3"])
def test_methods_with_a_model_of_their_own_take_it(method):
    check("--speculative-config", f'{{"method": "{method}", "model": "folder"}}')


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"enable_kv_cache_events": true, "buffer_steps": 0}', "buffer_steps is 0; it must be from 1 to"),
        ('{"enable_kv_cache_events": true, "hwm": 0}', "hwm is 0; it must be from 1 to"),
        ('{"enable_kv_cache_events": true, "load_hz": 1000.5}', "load_hz is 1000.5; it must be from 0 to 1000"),
        ('{"enable_kv_cache_events": true, "load_hz": -1}', "load_hz is -1"),
        ('{"load_hz": 20}', "load_hz is 20, but nothing is published; set"),
        ('{"enable_kv_cache_events": true, "publisher": "null", "load_hz": 20}', "but nothing is published"),
        ('{"endpoint": "*:5557"}', r"endpoint is '\*:5557'; write tcp://ADDRESS:PORT"),
        ('{"replay_endpoint": "inproc://x"}', "replay_endpoint is 'inproc://x'; write tcp://"),
        ('{"replay_endpoint": "tcp://*:5557"}', "endpoint and replay_endpoint are both"),
        ('{"topic": "kvasir-load"}', "topic 'kvasir-load' also selects kvasir-load"),
        ('{"topic": "kv"}', "topic 'kv' also selects kvasir-load"),
    ],
)
def test_a_kv_events_config_that_cannot_work_is_refused(config, message):
    with pytest.raises(ConfigurationError, match=f"--kv-events-config: .*{message}"):
        check("--kv-events-config", config)


@pytest.mark.parametrize(
    "config",
    [
        '{"enable_kv_cache_events": true, "buffer_steps": 1, "hwm": 1, "load_hz": 1000, "topic": "kv-events"}',
        '{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/events", "replay_endpoint": "tcp://[::1]:5558"}',
        '{"enable_kv_cache_events": false, "publisher": "zmq", "topic": ""}',
        "{}",
    ],
)
def test_a_kv_events_config_at_its_bounds_is_taken(config):
    check("--kv-events-config", config)


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint", "message"),
    [
        ("tcp://*:5557", "tcp://*:5558", "the ports 5557 and 5558 are too close for --data-parallel-size 2"),
        ("tcp://*:x", "tcp://*:5558", r"endpoint is 'tcp://\*:x'; write a port"),
        ("tcp://*:5557", "tcp://*:5559", None),
        ("tcp://*:5559", "tcp://*:5557", None),
        ("ipc:///tmp/a", "ipc:///tmp/b", None),
    ],
)
def test_data_parallel_ranks_need_ports_that_lie_apart(endpoint, replay_endpoint, message):
    config = f'{{"endpoint": "{endpoint}", "replay_endpoint": "{replay_endpoint}"}}'
    flags = ("--kv-events-config", config, "--data-parallel-size", "2")
    if message is None:
        check(*flags)
    else:
        with pytest.raises(ConfigurationError, match=message):
            check(*flags)


def transfer_config(extra: str) -> str:
    return f'{{"kv_connector": "NixlConnector", "kv_connector_extra_config": {extra}}}'


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('{"side_channel_port": 65536}', "side_channel_port is 65536; it must be from 0 to 65535"),
        ('{"lease_seconds": 0}', "lease_seconds is 0.0; it must be from 0.1"),
        ('{"timeout_seconds": 0}', "timeout_seconds is 0.0; it must be from 0.1"),
        ('{"side_channel_host": "0.0.0.0"}', "side_channel_host is '0.0.0.0'; other engines are told it"),
        ('{"side_channel_host": ""}', "side_channel_host is ''"),
    ],
)
def test_a_kv_transfer_config_that_cannot_work_is_refused(extra, message):
    with pytest.raises(ConfigurationError, match=f"--kv-transfer-config: {message}"):
        check("--kv-transfer-config", transfer_config(extra))


def test_a_kv_transfer_config_at_its_bounds_is_taken():
    check("--kv-transfer-config", transfer_config('{"side_channel_port": 65535, "lease_seconds": 0.1}'))
    check("--kv-transfer-config", transfer_config('{"side_channel_port": 0, "timeout_seconds": 0.1}'))


def test_ranks_of_every_kind_exchange_kv():
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"):
        check("--kv-transfer-config", transfer_config("{}"), flag, "2")


@pytest.mark.parametrize(("port", "is_taken"), [(0, False), (1, True), (65533, True), (65534, False)])
def test_data_parallel_ranks_need_ports_in_a_row_to_exchange_kv(port, is_taken):
    flags = ("--kv-transfer-config", transfer_config(f'{{"side_channel_port": {port}}}'), "--data-parallel-size", "3")
    if is_taken:
        check(*flags)
    else:
        with pytest.raises(
            ConfigurationError, match=f"side_channel_port is {port}; with --data-parallel-size 3, whose"
        ):
            check(*flags)


def test_transferred_blocks_need_the_prefix_cache():
    with pytest.raises(ConfigurationError, match="--kv-transfer-config and --no-enable-prefix-caching exclude"):
        check("--kv-transfer-config", transfer_config("{}"), "--no-enable-prefix-caching")


def test_experts_are_shared_out_among_tensor_ranks_only():
    check("--enable-expert-parallel", "--tensor-parallel-size", "2")
    for flags in ((), ("--data-parallel-size", "2"), ("--pipeline-parallel-size", "2")):
        with pytest.raises(ConfigurationError, match=r"--enable-expert-parallel.*--tensor-parallel-size is 1"):
            check("--enable-expert-parallel", *flags)


@pytest.mark.parametrize(
    ("num_nodes", "are_equal"), [(1, True), (2, True), (3, True), (12, True), (5, False), (24, False)]
)
def test_nodes_hold_equal_runs_of_all_ranks(num_nodes, are_equal):
    sizes = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--data-parallel-size", "3")
    flags = (*sizes, "--nnodes", str(num_nodes))
    if are_equal:
        check(*flags)
    else:
        message = f"--nnodes is {num_nodes}, but .*2 times .*2 times --data-parallel-size 3 ranks do not divide"
        with pytest.raises(ConfigurationError, match=message):
            check(*flags)


def test_a_partition_has_as_many_stages_as_the_pipeline():
    check("--pipeline-parallel-size", "2", "--pipeline-layer-partition", "3,5")
    for stages, partition in (("2", "8"), ("2", "3,4,1"), ("1", "3,5"), ("2", "8,0"), ("2", "9,-1")):
        with pytest.raises(
            ConfigurationError, match=rf"partition is {partition}, but --pipeline-parallel-size is {stages}"
        ):
            check("--pipeline-parallel-size", stages, "--pipeline-layer-partition", partition)
