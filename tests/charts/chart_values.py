"""The chart's values and their schema, as Helm puts them together."""

import json
from typing import Any

import jsonschema
import yaml
from charts.values_table import CHART

VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES: dict[str, Any] = yaml.safe_load(VALUES_TEXT)
SCHEMA_TEXT = (CHART / "values.schema.json").read_text()
SCHEMA: dict[str, Any] = json.loads(SCHEMA_TEXT)
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def overlaid(values: Any, given: Any) -> Any:
    """Maps key by key; null takes a key away."""
    if not (isinstance(values, dict) and isinstance(given, dict)):
        return given
    merged = {key: overlaid(values.get(key), value) for key, value in given.items()}
    return {key: value for key, value in {**values, **merged}.items() if value is not None}


def validate(given: Any) -> None:
    """Raises ValidationError for values that Helm refuses."""
    VALIDATOR.validate(overlaid(VALUES, given))


def is_valid(given: Any) -> bool:
    return bool(VALIDATOR.is_valid(overlaid(VALUES, given)))
