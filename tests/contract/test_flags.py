"""The operator tells the other two programs everything by flags; they must understand every flag that it writes."""

from pathlib import Path

import pytest

from kvasir_operator.desired import desired_objects
from kvasir_operator.manifests import load_services
from kvasir_operator.settings import OperatorSettings
from kvasir_router.cli import parse_arguments
from kvasir_runtime.flags import Parser, add_flags, config_from

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def commands(example: Path, program: str) -> list[list[str]]:
    """Arguments, without the program's name, of every container that runs the program."""
    return [
        [*container["command"], *container.get("args", [])][1:]
        for service in load_services(example)
        for manifest in desired_objects(service, OperatorSettings())
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
        if container["command"][0] == program
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_runtime_understands_the_engine_pods_flags(example):
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser)
    found = commands(example, "kvasir-runtime")
    assert found
    for command, *arguments in found:
        assert command == "serve"
        config = config_from(parser.parse_all(arguments))
        assert config.server.host == "0.0.0.0"
        assert config.server.port == 8000


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_router_understands_the_router_pods_flags(example):
    found = commands(example, "kvasir-router")
    assert found
    for arguments in found:
        config = parse_arguments(arguments)
        assert (config.port, config.admin_port) == (8080, 9090)
        assert config.endpoints_service is not None
