"""The one door for manifests: `parse_service` turns what the API server or a YAML file holds into dataclasses.

It fills the same defaults and refuses the same manifests as the CRD, which is made from the same dataclasses, so that
`render` and `local` need no API server. Everything behind this door is typed and trusted.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from kvasir_operator.api import labels
from kvasir_operator.api.fields import (
    UNION_ORIGINS,
    Bounds,
    Items,
    Pattern,
    bare,
    constraints,
    is_group,
    manifest_fields,
)
from kvasir_operator.api.model import InferenceService, ServiceSpec
from kvasir_operator.api.pod_objects import Shape
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.api.rules import rules_of
from kvasir_operator.errors import InvalidManifestError

Group = TypeVar("Group")

_TOP_LEVEL_KEYS = {"apiVersion", "kind", "metadata", "spec", "status"}


def parse_service(manifest: Mapping[str, Any]) -> InferenceService:
    """An InferenceService from its manifest.

    Raises InvalidManifestError with the first field that does not hold. A missing metadata.namespace is `default`.
    """
    _require_kind(manifest)
    metadata = _mapping(manifest.get("metadata"), "metadata")
    spec = manifest.get("spec")
    service = InferenceService(
        name=_text(metadata.get("name"), "metadata.name"),
        namespace=_text(metadata.get("namespace") or "default", "metadata.namespace"),
        spec=parse_group(ServiceSpec, spec if metadata.get("uid") is None else _without_leftovers(spec), "spec"),
        uid=metadata.get("uid"),
    )
    _check_rules(service, "")
    if service.uid is None:
        _check_shapes(ServiceSpec, service.spec, "spec")
    return service


def _without_leftovers(group: Any) -> Any:
    """A stored group without the `replicas` that counted before it had autoscaling or disaggregation: the CRD lets them
    stand where they were."""
    if not isinstance(group, Mapping):
        return group
    split = group.get("disaggregation")
    is_counted = not split and not group.get("autoscaling")
    kept = {key: value for key, value in group.items() if is_counted or key != "replicas"}
    roles = {name: _without_leftovers(role) for name, role in split.items()} if isinstance(split, Mapping) else split
    return kept if split is None else {**kept, "disaggregation": roles}


def parse_group(cls: type[Group], value: Any, path: str) -> Group:
    """A dataclass of api/ from a mapping in the manifest's words.

    Raises InvalidManifestError, whose field path begins with `path`.
    """
    parsed: Group = _dataclass(cls, value, path)
    return parsed


def _require_kind(manifest: Any) -> None:
    manifest = _mapping(manifest, "")
    for key, expected in (("apiVersion", labels.API_VERSION), ("kind", labels.KIND)):
        if manifest.get(key) != expected:
            raise InvalidManifestError(key, f"{_seen(manifest.get(key))}, expected {expected}")
    _refuse_unknown(manifest, _TOP_LEVEL_KEYS, "")


def _value(hint: Any, value: Any, path: str) -> Any:
    """A value of the type that `hint` names; `hint` may carry constraints."""
    limits, kind = constraints(hint), bare(hint)
    origin = get_origin(kind)
    if is_group(kind):
        return _dataclass(kind, value, path)
    if origin is tuple:
        return _list(get_args(kind)[0], limits, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _map(get_args(kind)[1], limits, value, path)
    if origin in UNION_ORIGINS:
        return _either(get_args(kind), limits, value, path)
    if origin is Literal:
        return _choice(get_args(kind), value, path)
    return _scalar(kind, limits, value, path)


def _dataclass(cls: type, value: Any, path: str) -> Any:
    given = _mapping(value, path)
    fields = manifest_fields(cls)
    _refuse_unknown(given, {f.key for f in fields}, path)
    values = {}
    for f in fields:
        seen = given.get(f.key)
        if seen is None or (seen == "" and f.is_optional and _may_be_empty(f.hint)):
            if f.is_required:
                raise InvalidManifestError(_below(path, f.key), "missing, and it has no default")
            continue  # nulls too, which the API server drops
        values[f.name] = _value(f.hint, seen, _below(path, f.key))
    result = cls(**values)
    _check_rules(result, path)
    return result


def _may_be_empty(hint: Any) -> bool:
    """Free text, for which users write "" where they mean to say nothing."""
    return bare(hint) is str and not any(isinstance(limit, Pattern) and limit.regex for limit in constraints(hint))


def _check_rules(value: Any, path: str) -> None:
    for rule in rules_of(type(value)):
        if not rule.holds(value):
            raise InvalidManifestError(path, rule.message)


def _list(item_hint: Any, limits: Sequence[Any], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidManifestError(path, f"{_seen(value)}, expected a list")
    _check_length(len(value), limits, path, "entries")
    items = tuple(_value(item_hint, item, f"{path}[{index}]") for index, item in enumerate(value))
    for limit in limits:
        if isinstance(limit, Items) and (limit.unique or limit.unique_by):
            _refuse_duplicates([getattr(i, limit.unique_by) if limit.unique_by else i for i in items], path)
    return items


def _refuse_duplicates(keys: Sequence[Any], path: str) -> None:
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise InvalidManifestError(f"{path}[{index}]", f"{key!r} appears twice, expected each once")


def _map(value_hint: Any, limits: Sequence[Any], value: Any, path: str) -> dict[str, Any]:
    given = _mapping(value, path)
    _check_length(len(given), limits, path, "keys")
    if value_hint is Any:
        return dict(given)
    said = {key: item for key, item in given.items() if item is not None}  # the API server drops nulls here too
    return {key: _value(value_hint, item, f"{path}.{key}") for key, item in said.items()}


def _check_shapes(cls: type, group: Any, path: str) -> None:
    """Of what is passed through. A stored service is spared: the API server names the child that it refuses, and the
    others are cared for as before."""
    for f in manifest_fields(cls):
        value, below = getattr(group, f.name), _below(path, f.key)
        for limit in constraints(f.hint):
            if isinstance(limit, Shape):
                _check_shape(limit.fields, value, below)
        if is_group(bare(f.hint)) and value is not None:
            _check_shapes(bare(f.hint), value, below)


def _check_shape(shape: Any, value: Any, path: str) -> None:
    if value is None:
        return
    if isinstance(shape, list):
        for index, item in enumerate(_typed(value, list, "a list", path)):
            _check_shape(shape[0], item, f"{path}[{index}]")
    elif isinstance(shape, Mapping):
        given = _mapping(value, path)
        if str not in shape:
            _refuse_unknown(given, set(shape), path)
        for key, item in given.items():
            _check_shape(shape.get(str) or shape[key], item, _below(path, key))
    else:
        _scalar(shape, (), value, path)


def _check_length(length: int, limits: Sequence[Any], path: str, unit: str) -> None:
    for limit in limits:
        if isinstance(limit, Items) and length > limit.maximum:
            raise InvalidManifestError(path, f"{length} {unit}, expected at most {limit.maximum}")


def _either(kinds: Sequence[Any], limits: Sequence[Any], value: Any, path: str) -> Any:
    """A number or a text (`int | str`, `int | Literal[...]`): the value's own type decides."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _scalar(int, limits, value, path)
    text_kind = next(kind for kind in kinds if kind is not int)
    if get_origin(text_kind) is Literal and value not in get_args(text_kind):
        raise InvalidManifestError(
            path, f"{_seen(value)}, expected a whole number or {' or '.join(get_args(text_kind))}"
        )
    return _scalar(str, limits, value, path)


def _choice(choices: Sequence[Any], value: Any, path: str) -> Any:
    for choice in choices:
        if value == choice and not isinstance(value, bool):
            return choice
    raise InvalidManifestError(path, f"{_seen(value)}, expected one of {', '.join(map(str, choices))}")


def _scalar(kind: Any, limits: Sequence[Any], value: Any, path: str) -> Any:
    if kind is bool:
        return _typed(value, bool, "true or false", path)
    if kind is int:
        return _bounded(_whole_number(value, path), limits, path)
    if kind is float:
        return _bounded(_number(value, (int, float), "a number", path), limits, path)
    if kind is Quantity and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    text = _text(value, path)
    return _matched(text, limits, path) if kind is str else _from_text(kind, text, path)


def _from_text(kind: Any, text: str, path: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        message = str(error)
        raise InvalidManifestError(path, message if text in message else f"{text!r}: {message}") from error


def _whole_number(value: Any, path: str) -> int:
    # The API server takes 2.0 for 2.
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return int(_number(whole, (int,), "a whole number", path))


def _number(value: Any, kinds: tuple[type, ...], expected: str, path: str) -> Any:
    if isinstance(value, bool):
        raise InvalidManifestError(path, f"{_seen(value)}, expected {expected}")
    return _typed(value, kinds, expected, path)


def _bounded(value: Any, limits: Sequence[Any], path: str) -> Any:
    for limit in limits:
        if isinstance(limit, Bounds) and not limit.minimum <= value <= limit.maximum:
            raise InvalidManifestError(path, f"{value}, expected {limit.minimum} to {limit.maximum}")
    return value


def _matched(text: str, limits: Sequence[Any], path: str) -> str:
    for limit in limits:
        if not isinstance(limit, Pattern):
            continue
        if len(text) > limit.max_length:
            raise InvalidManifestError(path, f"{len(text)} characters, expected at most {limit.max_length}")
        if limit.regex and not re.fullmatch(limit.regex, text):
            raise InvalidManifestError(path, f"{text!r}, expected text that matches {limit.regex}")
    return text


def _text(value: Any, path: str) -> str:
    return str(_typed(value, str, "text (quote it)", path))


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        raise InvalidManifestError(path, "missing, expected a mapping")
    given: Mapping[str, Any] = _typed(value, Mapping, "a mapping", path)
    for key in given:
        _typed(key, str, "keys that are text (quote them)", path)
    return given


def _typed(value: Any, kind: Any, expected: str, path: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidManifestError(path, f"{_seen(value)}, expected {expected}")
    return value


def _seen(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {value!r:.80}"


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _refuse_unknown(given: Mapping[str, Any], known: set[str], path: str) -> None:
    for key in given:
        if key not in known:
            raise InvalidManifestError(_below(path, key), f"unknown field, expected one of {', '.join(sorted(known))}")
