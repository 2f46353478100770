"""JSON Schemas as llguidance can promise them, and no weaker: keywords that it lacks are written in others where that
is exact; else the schema is refused, with the keyword and its place.

White space and the order of properties follow the schema: a comma or colon may be followed by white space, in bounds.
References are followed by us, so what nobody refers to is not looked at.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import llguidance

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.ecma_regex import rust_pattern
from kvasir_runtime.structured.formats import PATTERNS, REGEXES
from kvasir_runtime.structured.negation import (
    CHECKED,
    TYPES,
    NotExpressibleError,
    Resolve,
    Schema,
    are_disjoint,
    listed_values,
    negated,
    types_of,
)
from kvasir_runtime.structured.numbers import BOUNDS, LOWER_BOUNDS, bound_within, exact_value
from kvasir_runtime.structured.property_names import ESCAPES_OF_ONE_LETTER, NotSealedError, has_two_spellings, sealed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # there for type checkers alone

WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
MAX_DEPTH: Final = 128
MAX_REFS: Final = 32
"""Of references to references."""
MAX_WORK: Final = 50_000
"""Schemas and pairs of schemas that are looked at: about a second."""
MAX_TRIED: Final = 100
"""Parts of a schema that is refused, to find the one that is at fault."""
MAX_CONTAINS: Final = 8
"""Places in an array at which what it must contain may stand first."""
MAX_COUNTED: Final = 6
"""Optional properties whose number has bounds."""
REFUSED: Final = {
    "contains": "arrays that must hold something so often",
    "uniqueItems": "arrays without equal items",
    "unevaluatedProperties": "properties that no other keyword speaks of",
    "unevaluatedItems": "items that no other keyword speaks of",
    "$dynamicRef": "references that depend on who refers, in several resources",
    "$recursiveRef": "references that depend on who refers, in several resources",
    "extends": "keywords of draft 3",
    "disallow": "keywords of draft 3",
    "divisibleBy": "keywords of draft 3",
}
MAX_UNIQUE_ARRAYS: Final = 400
"""Enough for those of five values."""
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS: Final = ("$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "prefixItems")
_SINGLE: Final = ("additionalProperties", "additionalItems")
_WHOLE_NUMBERS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DATA: Final = ("const", "enum", "default", "example", "examples")
_KINDS: Final[dict[str, tuple[type | tuple[type, ...], str]]] = {
    "type": ((str, list), "a type's name or a list of them"),
    "required": (list, "a list of texts"),
    "enum": (list, "a list of values"),
    "pattern": (str, "a text"),
    "$ref": (str, "a text"),
    **dict.fromkeys(_MAPS, (dict, "an object of schemas")),
    **dict.fromkeys((*_LISTS, "oneOf"), (list, "a list of schemas")),
    **dict.fromkeys((*_WHOLE_NUMBERS, "multipleOf", *BOUNDS), ((int, float), "a number")),
}
"""Of keywords' values."""
MAX_SHOWN: Final = 80
_REF_ALONE: Final = ("draft-03", "draft-04", "draft-06", "draft-07")
"""In these drafts nothing beside `$ref` counts."""
_META_SCHEMAS: Final = {
    **{f"draft-0{number}": f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)},
    **{f"draft/{year}": f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")},
}
"""By what stands in each spelling of their address."""
_NAMES_ONLY: Final = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
"""Say what references mean, which has been found out."""


class UnsupportedKeywordError(GrammarError):
    """No backend can promise what a keyword asks."""

    def __init__(self, keyword: str, place: str, why: str) -> None:
        super().__init__(f"{keyword!r} at {place or 'the top'} of the schema cannot be promised: {why}")


Steps = tuple[str | int, ...]
"""From the top of a schema to a part of it."""


def json_schema_grammar(schema: Any, *, any_whitespace: bool = True, at: Steps = ()) -> str:
    """Of the part that stands there, whose references are the whole's. Raises GrammarError."""
    options: JsonCompileOptions = {"whitespace_flexible": any_whitespace}
    if any_whitespace:
        options["whitespace_pattern"] = WHITE_SPACE
    promised: Schema = promisable(schema, at)
    if has_two_spellings(promised):
        try:
            promised = sealed(promised)
        except NotSealedError:
            options["json_allowed_escapes"] = ESCAPES_OF_ONE_LETTER
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(promised), overrides=options)


def refused_part(schema: Any, refuses: Callable[[str], bool]) -> str:
    """Where the innermost part stands whose grammar is refused as that of the whole is."""
    steps: Steps = ()
    num_left = MAX_TRIED
    parts = _parts_of(schema)
    while (found := next(parts, None)) is not None and num_left:
        num_left -= 1
        further, part = found
        try:
            is_refused = refuses(json_schema_grammar(schema, at=(*steps, *further)))
        except GrammarError:
            continue
        if is_refused:
            steps, parts = (*steps, *further), _parts_of(part)
    return _pointer(steps)


def _pointer(steps: Steps) -> str:
    """RFC 6901's."""
    return "".join(f"/{_escaped(str(step))}" for step in steps)


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _parts_of(schema: Any) -> Iterator[tuple[Steps, Any]]:
    """The schemas that stand in it, and how to get there."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in _MAPS and isinstance(value, dict):
            yield from (((name, key), each) for key, each in value.items())
        elif name in (*_LISTS, "oneOf", "items") and isinstance(value, list):
            yield from (((name, number), each) for number, each in enumerate(value))
        elif name in (*_SINGLE, "items", "contains", "then", "else"):
            yield (name,), value


def promisable(schema: Any, at: Steps = ()) -> dict[str, Any]:
    """The same schema, or that part, in llguidance's keywords. Raises GrammarError."""
    try:
        rewritten = _Rewriting(schema).whole(at)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is malformed, a keyword has a value of the wrong kind: {error}") from error
    if rewritten is False:
        raise GrammarError("the schema is false: no answer follows it")
    return {} if rewritten is True else rewritten


def _check_kinds(schema: dict[str, Any], place: str) -> None:
    """Raises GrammarError."""
    for name, value in schema.items():
        kinds, words = _KINDS.get(name, (object, ""))
        if not isinstance(value, kinds) or (name == "required" and not all(map(_is_text, schema[name]))):
            shown = json.dumps(value)
            shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
            raise GrammarError(f"{name!r} at {place or 'the top'} of the schema is {shown}, but it should be {words}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


class _Rewriting:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._draft = _draft_of(root)
        self._ref_alone = any(each in (self._draft or "") for each in _REF_ALONE)
        self._is_one_resource = not any(_has_address(each) for each in itertools.islice(_parts(root), 1, None))
        """Else what a reference means depends on where it stands, and llguidance is left to follow them."""
        self._names: dict[str, str] = {}
        """Of what is referred to, by the reference."""
        self._left: list[tuple[str, str]] = []
        """References that are yet to be followed, and where the first of each stands."""
        self._work = 0

    def whole(self, at: Steps) -> Schema:
        part = self._root
        for step in at:
            part = part[step]
        rewritten = self.schema(part, _pointer(at), 0)
        definitions: dict[str, Schema] = {}
        while self._left:
            ref, place = self._left.pop()
            found = self._found(ref, place)
            definitions[self._names[ref]] = self.schema(found, unquote(ref.partition("#")[2]), 0)
        if definitions and isinstance(rewritten, dict):
            rewritten = {"$defs": definitions} | rewritten
        if self._draft is not None and isinstance(rewritten, dict):
            rewritten = {"$schema": self._draft} | rewritten
        return rewritten

    def schema(self, schema: Any, place: str, depth: int) -> Schema:
        self._count()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"a schema is an object or a boolean, but at {place or 'the top'} stands {schema!r:.100}"
            )
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH} levels")
        _check_kinds(schema, place)
        if "$ref" in schema and self._ref_alone:
            schema = {name: schema[name] for name in ("$ref", *_DEFINITIONS) if name in schema}
        together = [*self._one_of(schema, place, depth), *self._conditions(schema, place, depth)]
        together += self._dependencies(schema, place, depth)
        together += self._arrays(schema, place, depth)
        if schema.get("format") in PATTERNS:
            together.append({"pattern": PATTERNS[schema["format"]]})
        counts = self._counts(schema, place)
        if counts:
            together += counts
            schema = {name: value for name, value in schema.items() if name not in ("minProperties", "maxProperties")}
        if "propertyNames" in schema and "object" in types_of(schema):
            together.append(self._property_names(schema["propertyNames"], place))
        rewritten = dict(self._kept(schema, place, depth)) | self._bounds(schema, place)
        if together:
            rewritten["allOf"] = [*rewritten.get("allOf", []), *together]
        return rewritten

    def _count(self, work: int = 1) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise GrammarError(f"the schema is too large, {MAX_WORK:,} schemas within it and more are to be looked at")

    def _kept(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Keywords that stay."""
        for name, value in schema.items():
            here = f"{place}/{name}"
            if name == "$schema" or (self._is_one_resource and name in (*_NAMES_ONLY, *_DEFINITIONS)):
                continue  # written anew
            if name in _REFERENCES and self._is_one_resource:
                yield "$ref", f"#/$defs/{self._name(value, place)}"
            elif name == "pattern":
                yield name, _in_rust(name, value, place)
            elif name == "patternProperties":
                yield name, self._pattern_properties(value, place, depth)
            elif name in _MAPS and isinstance(value, dict):
                yield (
                    name,
                    {key: self.schema(each, f"{here}/{_escaped(key)}", depth + 1) for key, each in value.items()},
                )
            elif name in _LISTS or (name == "items" and isinstance(value, list)):
                yield name, [self.schema(each, f"{here}/{n}", depth + 1) for n, each in enumerate(value)]
            elif name in _SINGLE or name == "items":
                yield name, self.schema(value, here, depth + 1)
            elif name == "format":
                if value in REGEXES and value not in PATTERNS:
                    yield name, value
            elif name in ("const", "enum"):
                yield name, self._constant(name, value, place)
            elif name in _WHOLE_NUMBERS:
                yield name, int(value) if isinstance(value, float) and value.is_integer() else value
            elif name in REFUSED:
                if not _is_vacuous(name, schema) and not (
                    (name == "uniqueItems" and self._unique_arrays(schema))
                    or (name == "contains" and _is_plain(schema))
                ):
                    raise UnsupportedKeywordError(name, place, f"{REFUSED[name]}; leave it out and check the answer")
            elif name not in _REWRITTEN and name not in BOUNDS:
                yield name, value

    def _pattern_properties(self, schemas: dict[str, Any], place: str, depth: int) -> dict[str, Schema]:
        rewritten: dict[str, Schema] = {}
        for pattern, each in schemas.items():
            own = self.schema(each, f"{place}/patternProperties/{_escaped(pattern)}", depth + 1)
            key = _in_rust("patternProperties", pattern, place)
            rewritten[key] = {"allOf": [rewritten[key], own]} if key in rewritten else own
        return rewritten

    def _bounds(self, schema: dict[str, Any], place: str) -> dict[str, float]:
        """Of numbers, the narrowest by keyword."""
        bounds: dict[str, float] = {}
        for name in BOUNDS:
            value = schema.get(name)
            if isinstance(value, bool):  # draft 4, of the bound beside it
                value = schema.get(name.replace("exclusiveM", "m")) if value else None
            if value is None:
                continue
            found = bound_within(name, value, is_whole=schema.get("type") == "integer")
            if found is None:
                raise UnsupportedKeywordError(name, place, "it lies beyond the numbers of 64 bits")
            keyword, bound = found
            narrower = max if keyword in LOWER_BOUNDS else min
            bounds[keyword] = narrower(bound, bounds.get(keyword, bound))
        return bounds

    def _constant(self, keyword: str, value: Any, place: str) -> Any:
        try:
            return exact_value(value)
        except ValueError as error:
            raise UnsupportedKeywordError(keyword, place, f"it holds {error}") from error

    def _one_of(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        if "oneOf" not in schema:
            return
        here, given = f"{place}/oneOf", schema["oneOf"]
        outer = {"type": schema["type"]} if "type" in schema else {}
        typed = [outer | each if isinstance(each, dict) and "$ref" not in each else each for each in given]
        alternatives: list[Schema] = []
        for number, branch in enumerate(given):
            self._count(len(given))
            others = [each for other, each in enumerate(typed) if other != number]
            rivals = [each for each in others if not self._are_disjoint(typed[number], each)]
            opposites = [self._negated(each, "oneOf", place, depth, within=typed[number]) for each in rivals]
            own = self.schema(branch, f"{here}/{number}", depth + 1)
            alternatives.append({"allOf": [own, *opposites]} if opposites else own)
        yield {"anyOf": alternatives}

    def _unique_arrays(self, schema: dict[str, Any]) -> list[list[Any]]:
        """All that `uniqueItems` allows where items are listed; empty: they are not, or that would be too many."""
        items = schema.get("items")
        if not schema.get("uniqueItems") or not isinstance(items, dict) or "prefixItems" in schema:
            return []
        try:
            values = listed_values(self._resolved(items))
        except NotExpressibleError:
            return []
        most = min(len(values), int(schema.get("maxItems", len(values))))
        totals = itertools.accumulate(math.perm(len(values), number) for number in range(most + 1))
        if any(total > MAX_UNIQUE_ARRAYS for total in totals):
            return []
        return [list(each) for number in range(most + 1) for each in itertools.permutations(values, number)]

    def _arrays(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        """Of what arrays hold."""
        unique = [] if _is_vacuous("uniqueItems", schema) else self._unique_arrays(schema)
        if unique:
            yield {"anyOf": [_ALL_BUT["array"], {"enum": unique}]}
        if "contains" in schema and not _is_vacuous("contains", schema) and _is_plain(schema):
            wanted = self.schema(schema["contains"], f"{place}/contains", depth + 1)
            first = "prefixItems" if self._draft is None or "2020" in self._draft else "items"
            most = min(MAX_CONTAINS, schema.get("maxItems", MAX_CONTAINS))
            yield {
                "anyOf": [_ALL_BUT["array"]]
                + [{"type": "array", "minItems": n + 1, first: [*[True] * n, wanted]} for n in range(int(most))]
            }

    def _counts(self, schema: dict[str, Any], place: str) -> list[Schema]:
        """Of a bounded number of properties, some of which are named and optional: each choice of these."""
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if (least <= 0 and most is None) or "object" not in types_of(schema):
            return []
        required = set(schema.get("required", ()))
        optional = [name for name, each in schema.get("properties", {}).items() if name not in required]
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        num_others = 0 if is_closed else 1
        """Names that are not listed and count for sure: a second one may repeat the first."""
        if not optional:
            if least - len(required) > num_others:
                raise UnsupportedKeywordError("minProperties", place, "names that nothing lists could be repeated")
            return []
        if is_closed and most is None and least - len(required) == 1:
            return []  # as it is
        if most is None and least - len(required) == 1:
            some: list[Schema] = [{"required": [name]} for name in optional]
            none = {"type": "object", "properties": dict.fromkeys(optional, False), "minProperties": least}
            return [{"anyOf": [_ALL_BUT["object"], *some, none]}]
        if len(optional) > MAX_COUNTED:
            keyword = "maxProperties" if most is not None else "minProperties"
            raise UnsupportedKeywordError(keyword, place, f"more than {MAX_COUNTED} of the properties are optional")
        bounds = {"minProperties": least} | ({} if most is None else {"maxProperties": most})
        choices: list[Schema] = []
        for number in range(len(optional) + 1):
            total = number + len(required)
            if (most is not None and total > most) or total + num_others < least:
                continue
            for chosen in itertools.combinations(optional, number):
                left = {name: False for name in optional if name not in chosen}
                choices.append({"type": "object", "required": list(chosen), "properties": left} | bounds)
        return [{"anyOf": [_ALL_BUT["object"], *choices]}]

    def _property_names(self, names: Schema, place: str) -> Schema:
        """As a pattern of all properties."""
        try:
            regex = _regex_of(names, self._resolved)
        except NotExpressibleError as error:
            raise UnsupportedKeywordError("propertyNames", place, f"of names that {error} describes") from error
        except GrammarError as error:
            raise UnsupportedKeywordError("propertyNames", place, str(error)) from error
        if regex is None:
            return True
        allowed = {"type": "object", "additionalProperties": False}
        return {"anyOf": [_ALL_BUT["object"], allowed | ({"patternProperties": {regex: True}} if regex else {})]}

    def _conditions(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        if "not" in schema:
            yield self._negated(schema["not"], "not", place, depth, within=_beside(schema))
        if "if" in schema and ("then" in schema or "else" in schema):
            condition, then, otherwise = (
                self.schema(schema.get(name, True), f"{place}/{name}", depth + 1) for name in ("if", "then", "else")
            )
            opposite = self._negated(schema["if"], "if", place, depth, within=_beside(schema))
            yield {"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]}

    def _dependencies(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        for keyword in _DEPENDENCIES:
            for name, wanted in schema.get(keyword, {}).items():
                if isinstance(wanted, list):
                    then: Schema = {"required": wanted}
                else:
                    then = self.schema(wanted, f"{place}/{keyword}/{_escaped(name)}", depth + 1)
                yield {"anyOf": [{"properties": {name: False}}, then]}

    def _negated(self, schema: Schema, keyword: str, place: str, depth: int, within: Schema = True) -> Schema:
        try:
            opposite = negated(schema, self._resolved, self._resolved(within))
        except NotExpressibleError as error:
            raise UnsupportedKeywordError(keyword, place, f"it needs the opposite of {error}") from error
        return self.schema(opposite, place, depth + 1)

    def _are_disjoint(self, one: Schema, other: Schema) -> bool:
        try:
            return are_disjoint(one, other, self._resolved)
        except NotExpressibleError:
            return False

    def _resolved(self, schema: Schema) -> Schema:
        """Of references that stand alone."""
        self._count()
        for _ in range(MAX_REFS):
            if not isinstance(schema, dict):
                return schema
            ref = next((schema[name] for name in _REFERENCES if name in schema), None)
            if ref is None:
                return schema
            if not self._ref_alone and any(name in CHECKED and name not in _REFERENCES for name in schema):
                raise NotExpressibleError("$ref beside others")
            schema = self._target(ref)
        raise NotExpressibleError("a reference to itself")

    def _name(self, ref: str, place: str) -> str:
        if ref not in self._names:
            self._names[ref] = f"d{len(self._names)}"
            self._left.append((ref, place))
        return self._names[ref]

    def _found(self, ref: str, place: str) -> Schema:
        try:
            return self._target(ref)
        except NotExpressibleError as error:
            raise UnsupportedKeywordError("$ref", place, f"it is {error}") from error

    def _target(self, ref: str) -> Schema:
        address, _, fragment = ref.partition("#")
        own = self._root.get("$id", self._root.get("id")) if isinstance(self._root, dict) else None
        if address and address != str(own).partition("#")[0]:
            raise NotExpressibleError(f"a reference to another document, {ref!r}")
        if fragment and not fragment.startswith("/"):
            return self._anchored(fragment, ref)
        found = self._root
        for step in unquote(fragment)[1:].split("/") if fragment not in ("", "/") else ():
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise NotExpressibleError(f"a reference to nothing, {ref!r}") from error
        target: Schema = found
        return target

    def _anchored(self, name: str, ref: str) -> Schema:
        for part in _parts(self._root):
            if name in (part.get("$anchor"), part.get("$dynamicAnchor")) or f"#{name}" in (
                part.get("$id"),
                part.get("id"),
            ):
                return part
        raise NotExpressibleError(f"a reference to nothing, {ref!r}")


_OF_TYPE: Final = {"unevaluatedProperties": "object"} | dict.fromkeys(
    ("contains", "uniqueItems", "unevaluatedItems"), "array"
)
_DEPENDENCIES: Final = ("dependencies", "dependentRequired", "dependentSchemas")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
"""The last two are the first where a schema is one resource."""
_REWRITTEN: Final = (
    "oneOf", "not", "if", "then", "else", *_DEPENDENCIES, "propertyNames", "minContains", "maxContains"
)  # fmt: skip
"""In other keywords; the last two go with `contains`."""
_ALL_BUT: Final = {type_: {"type": [each for each in TYPES if each != type_]} for type_ in TYPES}


def _in_rust(keyword: str, pattern: str, place: str) -> str:
    try:
        return rust_pattern(pattern)
    except GrammarError as error:
        raise UnsupportedKeywordError(keyword, place, str(error)) from error


def _draft_of(root: Any) -> str | None:
    """The address of its meta-schema, as everybody spells it; None: it names none, or one of its own."""
    named = root.get("$schema") if isinstance(root, dict) else None
    return next((address for part, address in _META_SCHEMAS.items() if part in str(named)), None)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects that may be schemas, itself first."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += [value for name, value in part.items() if name not in _DATA]
        elif isinstance(part, list):
            left += part


def _has_address(schema: dict[str, Any]) -> bool:
    """Whether references within are to be read from another place."""
    return any(isinstance(at := schema.get(name), str) and not at.startswith("#") for name in ("$id", "id"))


def _is_plain(schema: dict[str, Any]) -> bool:
    """Whether what an array contains is asked for once."""
    return schema.get("minContains", 1) == 1 and "maxContains" not in schema


def _beside(schema: dict[str, Any]) -> Schema:
    """What is sure where a condition is looked at."""
    return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties") if name in schema}


def _regex_of(names: Schema, resolve: Resolve) -> str | None:
    """Of the strings that a schema allows; None: of all, empty: of none. Raises NotExpressibleError."""
    names = resolve(names)
    if isinstance(names, bool):
        return None if names else ""
    asked = [name for name in names if name in CHECKED and name != "type"]
    if "string" not in types_of(names):
        return ""
    if {*asked} <= {"minLength", "maxLength"}:
        bounds = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        return f"^(?s:.{{{bounds}}})$" if asked else None
    match asked:
        case ["pattern"]:
            return rust_pattern(names["pattern"])
        case ["enum" | "const"]:
            words = [value for value in listed_values(names) if isinstance(value, str)]
            return f"^(?:{'|'.join(map(re.escape, words))})$" if words else ""
        case ["anyOf"]:
            ways = [_regex_of(each, resolve) for each in names["anyOf"]]
            return None if None in ways else "|".join(f"(?:{way})" for way in ways if way)
    raise NotExpressibleError(" beside ".join(asked))


def _is_vacuous(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether the keyword asks for nothing."""
    if keyword in _OF_TYPE and _OF_TYPE[keyword] not in types_of(schema):
        return True
    match keyword:
        case "uniqueItems":
            return not schema.get(keyword) or schema.get("maxItems", 2) <= 1
        case "contains":
            return bool(schema.get("minContains") == 0 and "maxContains" not in schema)
        case "unevaluatedProperties" | "unevaluatedItems":
            return schema[keyword] is True
    return False
