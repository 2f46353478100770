"""`kvasir-operator run | render FILE... | local FILE... | crd`: flags in, exit status out.

Flags of `run` and `render` are derived from OperatorSettings. Exit status 2 means that what was asked for is wrong
(a flag, a file, a manifest), 1 that it could not be done.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvasir_operator import __version__
from kvasir_operator.api import labels
from kvasir_operator.api.crd import crd_text
from kvasir_operator.api.defaults import InstallationDefaults, read_defaults
from kvasir_operator.api.fields import without_none
from kvasir_operator.api.manifests import load_manifests, title
from kvasir_operator.errors import (
    InvalidManifestError,
    InvalidSettingsError,
    KvasirOperatorError,
    UnreadableManifestError,
)
from kvasir_operator.local.options import DEFAULT_LISTEN, LocalOptions
from kvasir_operator.local.run import run_local
from kvasir_operator.render import render_services
from kvasir_operator.settings import OperatorSettings

_USAGE_ERRORS = (InvalidManifestError, InvalidSettingsError, UnreadableManifestError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        return status
    except _USAGE_ERRORS as error:
        return _fail(error, 2)
    except KvasirOperatorError as error:
        return _fail(error, 1)


def _fail(error: Exception, status: int) -> int:
    print(f"kvasir-operator: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvasir-operator", description="Serve InferenceService manifests.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="run | render | local | crd")

    run = commands.add_parser("run", help="reconcile the InferenceServices of a cluster", allow_abbrev=False)
    _add_settings(run)
    run.set_defaults(command=_run)

    render = commands.add_parser("render", help="print the objects that the cluster would get", allow_abbrev=False)
    render.add_argument("files", nargs="+", type=Path, metavar="FILE", help="InferenceService manifests")
    _add_settings(render)
    render.set_defaults(command=_render)

    local = commands.add_parser("local", help="run the same objects as processes of this machine", allow_abbrev=False)
    local.add_argument("files", nargs="+", type=Path, metavar="FILE", help="InferenceService manifests")
    local.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="ADDRESS:PORT",
        help="loopback address and port of the router, of each further service one port on; port 0 takes a free one "
        "(default: %(default)s)",
    )
    local.set_defaults(command=_local)

    crd = commands.add_parser("crd", help="print the custom resource definition", allow_abbrev=False)
    crd.set_defaults(command=_crd)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    # Here and not at the top: kopf and the Kubernetes client take a second to import, which `local` does not need.
    from kvasir_operator.run import run_operator

    run_operator(_settings(arguments))
    return 0


def _render(arguments: argparse.Namespace) -> int:
    files = [load_manifests(path) for path in arguments.files]
    rendered = render_services([service for file in files for service in file.services], _settings(arguments))
    sys.stdout.write(rendered.text)
    passed_over = [f"{title(other)} is passed over" for file in files for other in file.others]
    for warning in (*rendered.warnings, *passed_over):
        print(f"kvasir-operator: warning: {warning}", file=sys.stderr)
    return 0


def _local(arguments: argparse.Namespace) -> int:
    return run_local(arguments.files, LocalOptions.parse(arguments.listen))


def _crd(_: argparse.Namespace) -> int:
    sys.stdout.write(crd_text())
    return 0


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag a field of OperatorSettings; a file holds the one that is no single value."""
    hints = get_type_hints(OperatorSettings)
    parser.add_argument(
        "--pod-defaults", type=Path, metavar="FILE", help="YAML of defaults and profiles for engine and router pods"
    )
    for field in _flag_fields():
        hint, _ = without_none(hints[field.name])
        parser.add_argument(f"--{field.name.replace('_', '-')}", **_flag_options(field, hint))


def _flag_fields() -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(OperatorSettings) if "help" in field.metadata]


def _flag_options(field: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    text = field.metadata["help"]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": field.default, "help": text}
    if get_origin(hint) is tuple:
        return {"action": "append", "default": [], "metavar": "NAME", "help": text}
    choices = get_args(hint) if get_origin(hint) is Literal else None
    return {
        "type": str if choices else hint,
        "choices": choices,
        "default": field.default,
        "metavar": None if choices else field.name.rpartition("_")[2].upper(),
        "help": text if field.default is None else f"{text} (default: %(default)s)",
    }


def _settings(arguments: argparse.Namespace) -> OperatorSettings:
    path = arguments.pod_defaults
    defaults = InstallationDefaults() if path is None else read_defaults(path)
    given = {field.name: getattr(arguments, field.name) for field in _flag_fields()}
    flags: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    gateway_secret = os.environ.get(labels.GATEWAY_SECRET_ENV)
    return OperatorSettings(**flags, defaults=defaults, gateway_secret=gateway_secret)
