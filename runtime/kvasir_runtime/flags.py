"""The command line, derived from the configuration's dataclasses, so that a flag is written once.

argparse, because every start would pay for more: typer took 0.5 s to import where argparse took 0.05 (two busy cores),
and none of typer, tyro and cyclopts would make this shorter, since flat flags of nested groups, one-line errors and the
nearest known flag would have to be told to each.
"""

import argparse
import dataclasses
import difflib
import json
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from kvasir_runtime.config import RuntimeConfig

POSITIONAL = "model"
NEAR = 0.8
"""Least likeness of the name that is suggested for an unknown one: a letter or two of ten are wrong."""
_UNITS = {
    **dict.fromkeys(("seconds", "timeout", "delay"), "SECONDS"), "ms": "MILLISECONDS", "bytes": "BYTES",
    "len": "TOKENS", "tokens": "TOKENS", "size": "N", "port": "PORT", "host": "ADDRESS", "addr": "ADDRESS",
    "dir": "FOLDER", "tokenizer": "FOLDER", "template": "FILE", "utilization": "SHARE",
}  # fmt: skip
"""What a flag takes, by the last word of its name."""
_OTHERS = {int: "N", float: "NUMBER", str: "TEXT"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """With the defaults that the text does not explain."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_explained = action.default in (None, ()) or "default: " in (action.help or "")
        return action.help if is_explained else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Says which known flag an unknown one comes close to; ends with status 2 on a wrong command line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(self._with_keys_joined(arguments))
        if unknown:
            hint = _nearest(unknown[0].split("=")[0], _flags_of(self)) or "; see --help for the flags there are"
            self.error(f"unknown argument {unknown[0]}{hint}")
        return namespace

    def _with_keys_joined(self, arguments: Sequence[str]) -> list[str]:
        """Keys of a JSON object may come one by one, as vLLM takes them: `--speculative-config.method ngram`."""
        known, others, objects = set(_flags_of(self)), list[str](), dict[str, dict[str, Any]]()
        words = iter(arguments)
        for word in words:
            name, is_joined, value = word.partition("=")
            flag, *keys = name.split(".")
            if keys and flag in known:
                given = value if is_joined else next(words, None)
                if given is None:
                    self.error(f"argument {name}: expected one argument")
                self._set_key(objects.setdefault(flag, {}), name, keys, given)
            else:
                others.append(word)
        for flag in objects:
            if any(word.partition("=")[0] == flag for word in others):
                self.error(f"argument {flag}: it came as a whole and by its keys; write one of them")
        return [*others, *(f"{flag}={json.dumps(keys)}" for flag, keys in objects.items())]

    def _set_key(self, within: dict[str, Any], name: str, keys: Sequence[str], given: str) -> None:
        for key in keys[:-1]:
            inner = within.setdefault(key, {})
            if not isinstance(inner, dict):
                self.error(f"argument {name}: {key} has a value of its own; write it once")
            within = inner
        within[keys[-1]] = _json_or_text(given)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One group of flags for each group of the configuration."""
    for group_name, group_type in get_type_hints(RuntimeConfig).items():
        group = parser.add_argument_group(group_name)
        hints = get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            _add_flag(group, field, hints[field.name])


def config_from(namespace: argparse.Namespace) -> RuntimeConfig:
    groups = {
        name: group_type(**{field.name: _value(namespace, field.name) for field in dataclasses.fields(group_type)})
        for name, group_type in get_type_hints(RuntimeConfig).items()
    }
    return RuntimeConfig(**groups)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, NEAR)
    return f"; did you mean {close[0]}?" if close else ""


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Those of its commands included."""
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            found += [flag for command in action.choices.values() for flag in _flags_of(command)]
    return found


def _value(namespace: argparse.Namespace, name: str) -> Any:
    value = getattr(namespace, name)
    return tuple(name for names in value for name in names) if isinstance(value, list) else value


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    if field.name == POSITIONAL:
        group.add_argument(POSITIONAL, metavar="MODEL", help=field.metadata["help"])
        return
    options: dict[str, Any] = {"help": field.metadata["help"], "default": field.default, "dest": field.name}
    value_type = _without_none(hint)
    if value_type is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(value_type) is Literal:
        options["choices"] = get_args(value_type)
        options["type"] = type(get_args(value_type)[0])
    elif value_type == tuple[int, ...]:
        options.update(type=_integers, metavar="N,N,...")
    elif get_origin(value_type) is tuple:
        options.update(nargs="+", type=_names, metavar="NAME")
    elif get_origin(value_type) is dict:
        options.update(type=_json_object, metavar="JSON")
    elif dataclasses.is_dataclass(value_type):
        options.update(type=lambda text: _from_json(text, value_type), metavar="JSON")
    else:
        options.update(type=value_type, metavar=_UNITS.get(field.name.split("_")[-1], _OTHERS[value_type]))
    group.add_argument("--" + field.name.replace("_", "-"), **options)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; write them with commas, as 3,5") from None


def _names(text: str) -> list[str]:
    """One, or a JSON list of them, as vLLM takes them."""
    try:
        return msgspec.json.decode(text, type=list[str]) if text.startswith("[") else [text]
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of strings: {error}") from None


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {error}") from error


def _from_json(text: str, kind: Any) -> Any:
    """A JSON object to a frozen dataclass: unknown keys, missing ones and wrong types are errors."""
    try:
        content = msgspec.json.decode(text, type=dict[str, Any])
        _refuse_unknown_keys(content, kind)
        return msgspec.convert(content, kind)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no such JSON object: {error}") from error


def _refuse_unknown_keys(content: dict[str, Any], kind: Any) -> None:
    """Of objects within it as well."""
    hints = get_type_hints(kind)
    for key, value in content.items():
        if key not in hints:
            raise argparse.ArgumentTypeError(f"unknown key {key!r}{_nearest(key, list(hints))}")
        if isinstance(value, dict) and dataclasses.is_dataclass(hints[key]):
            _refuse_unknown_keys(value, hints[key])


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    return hint
