"""Where a live object lacks what we want of it: every desired value must be there; what others added is theirs.

Robust to the API server: fields it fills in and zero values it leaves out are no drift, and quantities are spelt as it
stores them (api/quantity.py). What is no longer desired cannot be seen here: the applied hash in plan.py covers it.
"""

from collections.abc import Iterator
from typing import Any

# Lists that the API server merges by key, so that others may add to them: what identifies an element, by list name.
_LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "ports": ("containerPort", "port", "protocol"),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_KEY_DEFAULTS = {"protocol": "TCP"}


def find_drift(desired: Any, live: Any) -> list[str]:
    """Dotted paths at which `live` differs from `desired`; empty when every desired value is present."""
    return list(_compare(desired, live, ()))


def as_stored(desired: Any, stored: Any, name: str = "") -> Any:
    """`desired` with the values that `stored` has in its place: what `find_drift` is to expect of a like object.

    `name` is the field's. What `stored` lacks is None, or left out of a list.
    """
    if isinstance(desired, dict) and isinstance(stored, dict):
        return {key: as_stored(value, stored.get(key), key) for key, value in desired.items()}
    if isinstance(desired, list) and isinstance(stored, list):
        return _list_as_stored(desired, stored, name)
    return stored


def _list_as_stored(desired: list[Any], stored: list[Any], name: str) -> list[Any]:
    keys = _LIST_KEYS.get(name)
    if keys is None or not all(isinstance(item, dict) for item in [*desired, *stored]):
        return stored
    by_key = {_identity(item, keys): item for item in stored}
    pairs = ((item, by_key.get(_identity(item, keys))) for item in desired)
    return [as_stored(item, found) for item, found in pairs if found is not None]


def _compare(desired: Any, live: Any, path: tuple[str, ...]) -> Iterator[str]:
    if desired == live or (_is_zero(desired) and _is_zero(live)):
        return
    if isinstance(desired, dict) and isinstance(live, dict):
        for key, value in desired.items():
            yield from _compare(value, live.get(key), (*path, key))
    elif isinstance(desired, list) and isinstance(live, list):
        yield from _compare_lists(desired, live, path)
    else:
        yield ".".join(path)


def _compare_lists(desired: list[Any], live: list[Any], path: tuple[str, ...]) -> Iterator[str]:
    keys = _LIST_KEYS.get(path[-1]) if path else None
    if keys is not None and all(isinstance(item, dict) for item in [*desired, *live]):
        live_by_key = {_identity(item, keys): item for item in live}
        for item in desired:
            identity = _identity(item, keys)
            yield from _compare(item, live_by_key.get(identity), (*path[:-1], f"{path[-1]}[{_label(identity)}]"))
    elif len(desired) != len(live):
        yield ".".join(path)
    else:
        for index, (wanted, seen) in enumerate(zip(desired, live, strict=True)):
            yield from _compare(wanted, seen, (*path[:-1], f"{path[-1] if path else ''}[{index}]"))


def _identity(item: dict[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, _KEY_DEFAULTS.get(key)) for key in keys)


def _label(identity: tuple[Any, ...]) -> str:
    return ",".join(str(part) for part in identity if part is not None)


def _is_zero(value: Any) -> bool:
    # The server leaves zero values of optional fields out, whatever their type.
    return value is None or value is False or value == 0 or value == "" or value == {} or value == []
