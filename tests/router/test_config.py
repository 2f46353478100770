from pathlib import Path

import pytest

from kvasir_router.cli import main, parse_arguments
from kvasir_router.config import HostPort, KvEventPorts, parse_duration, parse_event_ports, parse_size, router_secret_of
from kvasir_router.errors import ConfigError

ENDPOINT = ["serve", "--endpoint", "http://127.0.0.1:8000"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("60s", 60.0), ("1.5m", 90.0), ("1h", 3600.0), ("7", 7.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "size"), [("64Mi", 64 * 2**20), ("10M", 10**7), ("5", 5)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_engines_publish_on_two_ports() -> None:
    config = parse_arguments([*ENDPOINT, "--kv-events", "5557:5558"])
    assert config.kv_events == KvEventPorts(events=5557, replay=5558)


@pytest.mark.parametrize("text", ["5557", "5557:", ":5558", "0:5558", "5557:0", "65536:1", "1:65536", "a:b", "1:2:3"])
def test_other_texts_are_no_two_ports(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example 5557:5558"):
        parse_event_ports(text)


def test_flags_become_the_configuration() -> None:
    config = parse_arguments(
        [*ENDPOINT, "--endpoint", "http://127.0.0.1:8001", "--model", "m", "--max-queue-wait", "5s"]
    )
    assert config.endpoint == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    assert (config.model, config.max_queue_wait, config.policy) == ("m", 5.0, "finishTime")


def test_a_model_may_have_several_aliases() -> None:
    config = parse_arguments([*ENDPOINT, "--model", "m", "--model-alias", "a", "--model-alias", "b"])
    assert (config.model, config.model_alias) == ("m", ("a", "b"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["serve"], "exactly one of --endpoint, --endpoints-service, --gateway; got none"),
        ([*ENDPOINT, "--endpoints-service", "a/b:1"], "got --endpoint and --endpoints-service"),
        (["serve", "--gateway", "a", "--model", "m"], "--model says nothing to a gateway"),
        (["serve", "--gateway", "a", "--gateway", "*"], "--gateway * is all namespaces"),
        ([*ENDPOINT, "--model-alias", "a"], "--model-alias 'a' stands for no model; name it with --model"),
        ([*ENDPOINT, "--model", "m", "--model", "a"], "--model is given twice, but takes one value"),
        (
            [*ENDPOINT, "--max-body-size", "2G"],
            "--max-body-size 2000000000 is more than --max-held-body-size 268435456",
        ),
        ([*ENDPOINT, "--bogus"], "unrecognized arguments: --bogus"),
        ([*ENDPOINT, "--polic", "roundRobin"], "unrecognized arguments"),
        ([*ENDPOINT, "--policy", "random"], "invalid choice: 'random'"),
        ([*ENDPOINT, "--port", "x"], "invalid int value"),
        ([*ENDPOINT, "--max-queue-wait", "soon"], "'soon' is not a duration"),
        ([*ENDPOINT, "--max-in-flight", "0"], "--max-in-flight is 0: expected 1 to 1000000000"),
        ([*ENDPOINT, "--tenant-max-in-flight", "0"], "--tenant-max-in-flight is 0: expected 1 to 1000000000"),
        ([*ENDPOINT, "--retries", "-1"], "--retries is -1: expected 0 to 1000000000"),
        ([*ENDPOINT, "--port", "65536"], "--port is 65536: expected 0 to 65535"),
        ([*ENDPOINT, "--bytes-per-token", "nan"], "--bytes-per-token is nan: expected more than 0 and at most 1e+09"),
        ([*ENDPOINT, "--probe-interval", "0s"], "--probe-interval is 0.0: expected more than 0 and at most 1e+09"),
        (
            [*ENDPOINT, "--tenant-tokens-per-minute", "5"],
            "--tenant-tokens-per-minute is a limit to each tenant, and needs --api-keys-file to tell them apart",
        ),
        (["serve", "--endpoint", "127.0.0.1:8000"], "is not a base URL"),
        (["serve", "--decode-endpoint", "d:8000"], "--decode-endpoint 'd:8000' is not a base URL"),
        (["serve", "--prefill-endpoint", "http://p:1"], "--prefill-endpoint alone answers nobody"),
        ([*ENDPOINT, "--kv-transfer-port", "65536"], "--kv-transfer-port is 65536: expected 0 to 65535"),
        ([*ENDPOINT, "--remote-prefill-min-tokens", "-1"], "is no number of tokens; write for example 2048, or auto"),
        ([*ENDPOINT, "--remote-prefill-min-tokens", "many"], "'many' is no number of tokens"),
        (["serve", "--endpoints-service", "llama"], "NAMESPACE/NAME:PORT"),
    ],
)
def test_a_wrong_flag_ends_with_one_clear_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_missing_keys_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ENDPOINT, "--port", "0", "--admin-port", "0", "--api-keys-file", str(tmp_path / "none")]) == 2
    assert "--api-keys-file" in capsys.readouterr().err


def test_help_tells_every_default_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [text in shown for text in ("(default: 1000)", "(default: 60s)", "(default: 64Mi)")] == [True] * 3


def test_config_error_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        parse_duration("-1s")


@pytest.mark.parametrize(
    ("environment", "secret"),
    [({}, None), ({"KVASIR_ROUTER_SECRET": ""}, None), ({"KVASIR_ROUTER_SECRET": "s3"}, "s3")],
)
def test_the_routers_secret_comes_from_the_environment(environment: dict[str, str], secret: str | None) -> None:
    assert router_secret_of(environment) == secret


@pytest.mark.parametrize("text", ["s3\n", "s 3", "\u00e4"])
def test_a_secret_that_no_header_can_carry_ends_the_start_and_is_not_printed(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVASIR_ROUTER_SECRET", text)
    assert main([*ENDPOINT, "--port", "0", "--admin-port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvasir-router: KVASIR_ROUTER_SECRET is sent as a header: write visible ASCII")
    assert text not in error


def test_engines_may_have_a_part_only() -> None:
    flags = ["--prefill-endpoint", "http://p:1", "--decode-endpoint", "http://d:1", "--decode-endpoint", "http://d:2"]
    config = parse_arguments(["serve", *flags])
    assert (config.prefill_endpoint, config.decode_endpoint) == (("http://p:1",), ("http://d:1", "http://d:2"))
    assert (config.kv_transfer_port, config.kv_transfer_protocol) == (5600, "kvasir")


@pytest.mark.parametrize(("text", "min_tokens"), [("auto", None), ("0", 0), ("2048", 2048)])
def test_remote_prefill_begins_at_a_number_of_tokens_or_where_it_costs_less(text: str, min_tokens: int | None) -> None:
    assert parse_arguments([*ENDPOINT, "--remote-prefill-min-tokens", text]).remote_prefill_min_tokens == min_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama-router-peers.models.svc:5559", HostPort("llama-router-peers.models.svc", 5559)),
        ("10.0.0.1:1", HostPort("10.0.0.1", 1)),
        ("[::1]:65535", HostPort("::1", 65535)),
    ],
)
def test_peers_are_a_name_and_a_port(text: str, expected: HostPort) -> None:
    assert parse_arguments([*ENDPOINT, "--peers", text]).peers == expected


@pytest.mark.parametrize("text", ["peers", "peers:", ":5559", "peers:0", "peers:65536", "a b:1", "peers:x", "::1:5"])
def test_what_is_no_name_and_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example llama-router-peers"):
        parse_arguments([*ENDPOINT, "--peers", text])
