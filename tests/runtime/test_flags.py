"""The command line is the configuration's dataclasses, and nothing else."""

import pytest

from kvasir_runtime.config import RuntimeConfig, SpeculativeConfig
from kvasir_runtime.flags import HelpFormatter, Parser, add_flags, config_from

SPECULATIVE = ("--speculative-config",)
KV_EVENTS = ("--kv-events-config",)


def parse(*arguments: str) -> RuntimeConfig:
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser)
    return config_from(parser.parse_all(arguments))


def test_the_defaults_are_those_of_the_dataclasses():
    config = parse("folder")
    assert config == RuntimeConfig(model=type(config.model)(model="folder"))


def test_flags_are_typed_as_their_fields():
    config = parse(
        "folder", "--served-model-name", "a", "b", "--no-enable-prefix-caching", "--block-size", "32",
        "--gpu-memory-utilization", "0.5", "--max-model-len", "128", "--async-scheduling",
        "--pipeline-layer-partition", "3,5",
    )  # fmt: skip
    assert config.parallel.pipeline_layer_partition == (3, 5)
    assert config.model.served_model_name == ("a", "b")
    assert (config.cache.enable_prefix_caching, config.cache.block_size) == (False, 32)
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.model.max_model_len == 128
    assert config.scheduler.async_scheduling is True


@pytest.mark.parametrize("names", [["https://a", "https://b"], ['["https://a", "https://b"]']])
def test_names_may_be_words_or_a_list_of_json_as_for_vllm(names: list[str]):
    assert parse("folder", "--allowed-origins", *names).server.allowed_origins == ("https://a", "https://b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["folder", "--max-num-seq", "4"], "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["folder", "--frobnicate"], "unknown argument --frobnicate; see --help"),
        (["folder", "--enable-lora"], "unknown argument --enable-lora; see --help"),
        (["folder", "--quantization", "awq"], "unknown argument --quantization; see --help"),
        (["folder", "--block-size", "17"], "invalid choice: 17 (choose from"),
        (["folder", "--port.http", "5"], "invalid int value: '{"),
        (["folder", "--speculative-config.method"], "argument --speculative-config.method: expected one argument"),
        (["folder", "--speculative-config.methods", "ngram"], "unknown key 'methods'; did you mean method?"),
        (["folder", *SPECULATIVE, "{}", "--speculative-config.method", "ngram"], "it came as a whole and by its keys"),
        (["folder", "--pooler-config.a", "1", "--pooler-config.a.b", "2"], "a has a value of its own"),
        (["folder", "--frobnicate.key", "ngram"], "unknown argument --frobnicate.key; see --help"),
        (["folder", "--port", "http"], "invalid int value: 'http'"),
        (
            ["folder", "--pipeline-layer-partition", "3;5"],
            "'3;5' is no list of numbers; write them with commas, as 3,5",
        ),
        (["folder", "--pipeline-layer-partition", ""], "'' is no list of numbers"),
        (["folder", "--allowed-origins", "[*]"], "'[*]' is no JSON list of strings"),
        ([], "the following arguments are required: MODEL"),
        (["folder", *SPECULATIVE, "{"], "'{' is no such JSON object: Input data was truncated"),
        (["folder", *SPECULATIVE, "[]"], "Expected `object`, got `array`"),
        (["folder", *SPECULATIVE, "{}"], "Object missing required field `method`"),
        (["folder", *SPECULATIVE, '{"method": "oracle"}'], "Invalid enum value 'oracle' - at `$.method`"),
        (
            ["folder", *SPECULATIVE, '{"method": "ngram", "num_speculative_tokens": "4"}'],
            "Expected `int`, got `str` - at `$.num_speculative_tokens`",
        ),
        (
            ["folder", *KV_EVENTS, '{"enable_kv_cache_event": true}'],
            "unknown key 'enable_kv_cache_event'; did you mean enable_kv_cache_events?",
        ),
        (
            ["folder", "--kv-transfer-config", '{"kv_connector_extra_config": {"checksum": true}}'],
            "unknown key 'checksum'; did you mean checksums?",
        ),
        (["folder", *KV_EVENTS, '{"publisher": "kafka"}'], "Invalid enum value 'kafka' - at `$.publisher`"),
        (
            ["folder", *SPECULATIVE, '{"method": "ngram", "num_speculative_token": 4}'],
            "unknown key 'num_speculative_token'; did you mean num_speculative_tokens?",
        ),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_speculative_config_is_a_json_object_of_its_fields():
    config = parse(
        "folder", "--speculative-config", '{"method": "eagle3", "model": "heads", "num_speculative_tokens": 3}'
    )
    expected = SpeculativeConfig(method="eagle3", model="heads", num_speculative_tokens=3)
    assert config.execution.speculative_config == expected
    assert parse("folder").execution.speculative_config is None


@pytest.mark.parametrize(
    ("joined", "apart"),
    [
        (["--structured-outputs-config.backend", "guidance"], '{"backend": "guidance"}'),
        (["--structured-outputs-config.backend=guidance"], '{"backend": "guidance"}'),
    ],
)
def test_a_key_of_a_json_object_may_come_by_itself(joined: list[str], apart: str):
    assert parse("folder", *joined) == parse("folder", "--structured-outputs-config", apart)


def test_keys_that_come_one_by_one_are_one_object():
    config = parse(
        "folder", "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3",
        "--kv-transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role=kv_both",
        "--kv-transfer-config.kv_connector_extra_config.lease_seconds", "9.5", "--port", "80",
    )  # fmt: skip
    assert config.execution.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert config.cache.kv_transfer_config is not None
    assert config.cache.kv_transfer_config.kv_connector_extra_config.lease_seconds == 9.5
    assert config.server.port == 80


def test_help_names_units_and_only_defaults_that_are_values(capsys):
    parser = Parser(prog="kvasir-runtime", formatter_class=HelpFormatter)
    add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_all(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "--max-model-len TOKENS", "--max-body-bytes BYTES", "--stall-seconds SECONDS", "--max-step-ms MILLISECONDS",
        "--download-dir FOLDER", "--port PORT port to listen on (default: 8000)",
    ):  # fmt: skip
        assert part in shown
    for part in ("(default: None)", "(default: ())", " STR ", " INT "):
        assert part not in shown
