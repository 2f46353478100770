"""`kvasir-router serve`: flags derived from RouterConfig, one clear line on every start-up error."""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from kvasir_router import __version__, server
from kvasir_router.config import RouterConfig
from kvasir_router.errors import ConfigError, StartupError


class _OneLineParser(argparse.ArgumentParser):
    """argparse prints its whole usage before an error; one line says it better."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


class _StoreOnce(argparse.Action):
    """argparse lets the last of several win, and the others vanish without a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice, but takes one value")
        setattr(namespace, self.dest, values)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT. Returns 0, 1 (cannot start) or 2 (wrong flags)."""
    try:
        config = parse_arguments(argv)
        server.run(config)
    except StartupError as error:
        print(f"kvasir-router: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse_arguments(argv: Sequence[str] | None) -> RouterConfig:
    """Raises ConfigError on an unknown or malformed flag."""
    parser = _OneLineParser(
        prog="kvasir-router", description="Kvasir's router: one OpenAI endpoint in front of engines", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="serve")
    serve = commands.add_parser("serve", help="serve the OpenAI API in front of engines", allow_abbrev=False)
    for config_field in dataclasses.fields(RouterConfig):
        _add_flag(serve, config_field)
    values: dict[str, Any] = vars(parser.parse_args(argv))
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return RouterConfig(**values)


def _add_flag(parser: argparse.ArgumentParser, config_field: "dataclasses.Field[Any]") -> None:
    kind = typing.get_type_hints(RouterConfig)[config_field.name]
    is_repeatable = typing.get_origin(kind) is tuple
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    parser.add_argument(
        "--" + config_field.name.replace("_", "-"),
        action="append" if is_repeatable else _StoreOnce,
        type=_reader(config_field, kind),
        choices=choices,
        metavar=config_field.metadata["metavar"],
        default=argparse.SUPPRESS,
        help=_help_text(config_field),
    )


def _reader(config_field: "dataclasses.Field[Any]", kind: Any) -> Callable[[str], Any]:
    read = config_field.metadata["read"]
    if read is not None:
        return typing.cast("Callable[[str], Any]", read)
    if typing.get_origin(kind) in (types.UnionType, tuple):
        kind = typing.get_args(kind)[0]
    return typing.cast("Callable[[str], Any]", kind) if kind in (int, float) else str


def _help_text(config_field: "dataclasses.Field[Any]") -> str:
    default: Any = config_field.default
    metavar = config_field.metadata["metavar"]
    if metavar == "DURATION":
        default = f"{default:g}s"
    elif metavar == "SIZE":
        default = f"{default >> 20}Mi"
    shown = "" if default in (None, ()) else f" (default: {default})"
    return f"{config_field.metadata['help']}{shown}".replace("%", "%%")
