"""The command line: what it prints and which status it ends with."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from kvasir_operator.api.crd import crd_text
from kvasir_operator.api.labels import ROLE_LABEL
from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.cli import main
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.settings import OperatorSettings

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
QUICKSTART = next(path for path in EXAMPLES if path.name == "quickstart.yaml")


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_render_prints_exactly_the_desired_objects(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(example)]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))

    assert printed == [
        child for service in load_manifests(example).services for child in desired_objects(service, OperatorSettings())
    ]


def test_render_prints_the_same_text_each_time_without_anchors(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        main(["render", *map(str, EXAMPLES)])
        texts.append(capsys.readouterr().out)

    assert texts[0] == texts[1]
    assert "&id" not in texts[0]


def test_render_shows_that_there_is_a_secret_but_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", str(QUICKSTART)])
    [secret] = [each for each in yaml.safe_load_all(capsys.readouterr().out) if each["kind"] == "Secret"]

    assert not {"data", "stringData"} & secret.keys()
    assert "a random value is put in when this is made" in secret["metadata"]["annotations"]["serving.kvasir.dev/value"]


def test_the_speculative_example_drafts_with_the_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(QUICKSTART.with_name("speculative.yaml"))]) == 0
    printed = capsys.readouterr()
    [engine] = [
        each["spec"]["template"]["spec"]["containers"][0]
        for each in yaml.safe_load_all(printed.out)
        if each["kind"] == "Deployment" and each["metadata"]["labels"][ROLE_LABEL] == "serve"
    ]
    config = json.loads(dict(pairwise(engine["command"]))["--speculative-config"])

    assert (config["method"], config["model"]) == ("draft_model", "/draft-models/kvasir-python-700k")
    assert printed.err == ""


def test_render_passes_over_what_is_no_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(
        "{apiVersion: v1, kind: Namespace, metadata: {name: models}}\n---\n"
        "{apiVersion: serving.kvasir.dev/v1alpha1, kind: InferenceService, metadata: {name: a},"
        " spec: {model: {source: 'file:///m'}}}"
    )
    assert main(["render", str(file)]) == 0
    printed = capsys.readouterr()

    assert printed.err == "kvasir-operator: warning: Namespace models is passed over\n"
    assert "kind: Namespace" not in printed.out


def test_render_takes_the_operators_settings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", "--runtime-image", "mine:9", str(QUICKSTART)])

    assert "image: mine:9" in capsys.readouterr().out


def test_a_flag_may_be_repeated_where_it_names_one_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", "--image-pull-secret", "mirror", "--image-pull-secret", "hub", str(QUICKSTART)])
    [engine, router] = [
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all(capsys.readouterr().out)
        if each["kind"] == "Deployment"
    ]

    assert engine["imagePullSecrets"] == router["imagePullSecrets"] == [{"name": "mirror"}, {"name": "hub"}]


def test_render_warns_of_what_is_not_acted_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(QUICKSTART.read_text().replace("maxNumSeqs: 32", "quantization: int8"))

    assert main(["render", str(file)]) == 0
    assert "warning: quickstart: spec.engine.quantization: int8 is not supported yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["render", "local"])
def test_a_manifest_that_does_not_hold_ends_with_status_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(QUICKSTART.read_text().replace("maxNumSeqs", "maxSeqs"))

    assert main([command, str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvasir-operator: {file}: document 1: spec.engine.maxSeqs: unknown field")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["render", "--speed", "9", "x"], "unrecognized arguments: --speed"),
        (["render"], "required: FILE"),
        (["run", "--workers", "many"], "invalid int value: 'many'"),
        (["run", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_unknown_flags_and_values_end_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--workers", "0", "1 to 1000"),
        ("--lease-seconds", "2", "3 to 1000000"),
        ("--port", "65536", "0 to 65535"),
        ("--resync-seconds", "nan", "more than 0 and at most 1000000"),
    ],
)
def test_a_setting_out_of_bounds_ends_with_status_2(
    flag: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", flag, value, str(QUICKSTART)]) == 2
    assert f"{flag} is {value}: expected {expected}" in capsys.readouterr().err


def test_a_password_in_prometheus_address_is_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--prometheus-url", "https://me:hunter2@prometheus:9090", str(QUICKSTART)]) == 2
    error = capsys.readouterr().err
    assert "--prometheus-url holds a user's name or password" in error
    assert "hunter2" not in error


@pytest.mark.parametrize(
    "url", ["prometheus:9090", "http://", "http://[fd00::1", "http://prometheus:ninety", "ftp://a"]
)
def test_an_address_of_prometheus_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--prometheus-url", url, str(QUICKSTART)]) == 2
    assert "--prometheus-url is no address" in capsys.readouterr().err


def test_a_first_wait_above_the_longest_is_refused_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--retry-initial-seconds=60", str(QUICKSTART)]) == 2
    assert "--retry-initial-seconds 60 is more than --retry-max-seconds 30" in capsys.readouterr().err


def test_two_ways_to_say_who_asks_prometheus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prometheus-token-file=/token", "--prometheus-basic-auth-folder=/auth"]
    assert main(["render", *flags, str(QUICKSTART)]) == 2
    assert "are both set" in capsys.readouterr().err


@pytest.mark.parametrize("listen", ["8080", "0.0.0.0:8080", "192.168.1.1:80", "127.0.0.1:http", "127.0.0.1:70000"])
def test_local_listens_on_this_machine_only(listen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "--listen", listen, str(QUICKSTART)]) == 2
    assert f"--listen is '{listen}'" in capsys.readouterr().err


def test_every_setting_but_a_secret_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out

    settings = {field.name for field in dataclasses.fields(OperatorSettings)} - {"gateway_secret"}
    flags = {name: f"--{name.replace('_', '-')} " for name in settings}
    assert all(flag in text for flag in {**flags, "defaults": "--pod-defaults "}.values())


def test_render_lays_the_installations_defaults_under_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = tmp_path / "pod-defaults.yaml"
    defaults.write_text("engine: {pod: {schedulerName: volcano}}")
    assert main(["render", "--pod-defaults", str(defaults), str(QUICKSTART)]) == 0
    assert "schedulerName: volcano" in capsys.readouterr().out

    defaults.write_text("engine: {pod: {scheduler: volcano}}")
    assert main(["render", "--pod-defaults", str(defaults), str(QUICKSTART)]) == 2
    assert f"{defaults}: engine.pod.scheduler: unknown field" in capsys.readouterr().err


def test_a_gateway_is_believed_with_its_secret_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = tmp_path / "pod-defaults.yaml"
    defaults.write_text("gateway: {namespace: kvasir, name: shared, podLabels: {app: gateway}}")
    command = ["render", "--pod-defaults", str(defaults), str(QUICKSTART.with_name("gateway.yaml"))]
    assert main(command) == 2
    assert "KVASIR_GATEWAY_SECRET is not set: set it to the gateway's own value" in capsys.readouterr().err

    monkeypatch.setenv("KVASIR_GATEWAY_SECRET", "s")
    assert main(command) == 0
    rendered = capsys.readouterr()
    objects = list(yaml.safe_load_all(rendered.out))
    engines = [each for each in objects if each["kind"] == "Deployment"]
    secrets = [each for each in objects if each["kind"] == "Secret"]
    assert [each["spec"]["replicas"] for each in engines] == [1, 1]
    assert [{"data", "stringData"} & each.keys() for each in secrets] == [set(), set()]
    assert rendered.err == ""


def test_a_service_behind_a_gateway_that_is_not_there_gets_no_pods_and_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["render", str(QUICKSTART.with_name("gateway.yaml"))]) == 0
    rendered = capsys.readouterr()
    engines = [each for each in yaml.safe_load_all(rendered.out) if each["kind"] == "Deployment"]
    assert [each["spec"]["replicas"] for each in engines] == [0, 0]
    assert "warning: large: spec.router.mode: this installation has no gateway" in rendered.err


def test_crd_prints_the_crd(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert capsys.readouterr().out == crd_text()
