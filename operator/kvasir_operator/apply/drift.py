"""Where a live object lacks what we want of it: every desired value must be there; what others added is theirs.

Robust to the API server: fields it fills in, zero values it leaves out and quantities it rewrites ("1000m" to "1")
are no drift. What is no longer desired cannot be seen here: the applied hash in plan.py covers it.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
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
_QUANTITY_PARENTS = frozenset({"limits", "requests", "hard", "capacity"})
_QUANTITY_FIELDS = frozenset({"sizeLimit"})
_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]i?|Ki|)")


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
    elif not _equal(desired, live, path):
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


def _equal(desired: Any, live: Any, path: tuple[str, ...]) -> bool:
    if desired == live:
        return True
    if not _holds_quantity(path):
        return False
    wanted, seen = parse_quantity(desired), parse_quantity(live)
    return wanted is not None and wanted == seen


def _holds_quantity(path: tuple[str, ...]) -> bool:
    return bool(path) and (path[-1] in _QUANTITY_FIELDS or (len(path) > 1 and path[-2] in _QUANTITY_PARENTS))


def parse_quantity(value: Any) -> Decimal | None:
    """A Kubernetes quantity ("8Gi", "500m", 2) in its base unit; None when it is not one."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None or match.group(2) not in _SUFFIXES:
        return None
    return Decimal(match.group(1)) * _SUFFIXES[match.group(2)]
