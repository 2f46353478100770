"""The router's own OpenAPI document: its paths, what a body must be for the router, and every way in which it says no.

What engines make of a body is theirs to say, and their answers pass through: their schemas are not repeated here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvasir_router.dialects.dialect import Dialect
from kvasir_router.request import DEADLINE_HEADER

_REFUSALS: Mapping[int, str] = {
    400: "The body is not a JSON object, or a header is wrong.",
    401: "An API key is needed.",
    404: "The model is not served here.",
    405: "The path does not take that method.",
    408: "The request came too slowly.",
    413: "The body is too large.",
    415: "The body's content encoding is not known here.",
    429: "The queue is full, or a limit of the tenant is reached.",
    431: "The head is too large.",
    500: "The router failed.",
    502: "No engine answered.",
    503: "No engine could take the request in time, or the router holds too much.",
    504: "The answer took too long.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer", "description": "Tokens of prompt and answer, as the engines say."},
    },
}
_MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
    },
}
_REQUEST = {
    "type": "object",
    "properties": {
        "model": {"type": "string", "description": "A name that /v1/models lists."},
        "stream": {"type": "boolean"},
        "priority": {"type": "integer", "description": "Lower is earlier, among the tenant's own requests."},
    },
}
HEALTH_PATHS = ("/health", "/ping")
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_RESPONSE_ID = {**_NAME, "name": "response_id"}


def document(dialects: Mapping[str, Dialect], kept_response_paths: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """As JSON, of version 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir router", "version": "1"},
        "paths": {
            "/openapi.json": {"get": _told("This document.")},
            **{path: {"get": _told("For load balancers: 503 while the router stops.", 503)} for path in HEALTH_PATHS},
            "/v1/models": {"get": _listing("Lists the models, aliases and adapters.", "Models", ())},
            "/v1/models/{name}": {"get": _listing("Tells of one of them.", "Model", (_NAME,))},
            **{path: {method.lower(): _kept() for method in methods} for path, methods in kept_response_paths.items()},
            **{path: {"post": _forwarded(dialect.error_schema)} for path, dialect in dialects.items()},
        },
        "components": {
            "schemas": {
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "Model": _MODEL,
                "Models": _MODELS,
                "Request": _REQUEST,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # without --api-keys-file the router is open
    }


def _told(summary: str, *statuses: int) -> dict[str, Any]:
    answers = {str(status): {"description": summary} for status in (200, *statuses)}
    return {"summary": summary, "security": [{}], "responses": {**answers, **_refusals(400, 405, 408, 431)}}


def _listing(summary: str, schema: str, parameters: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": [*parameters],
        "responses": {"200": _json("What is served.", schema), **_refusals(400, 401, 404, 405, 408, 431)},
    }


def _kept() -> dict[str, Any]:
    return {
        "summary": "Answered by the engine that keeps the response.",
        "parameters": [_RESPONSE_ID],
        "responses": {"200": {"description": "The engine's answer."}, **_refusals(400, 401, 404, 405, 408, 431, 502)},
    }


def _forwarded(error_schema: str) -> dict[str, Any]:
    return {
        "summary": "Answered by one engine.",
        "parameters": [
            {
                "name": DEADLINE_HEADER,
                "in": "header",
                "description": "Longest time in the queue.",
                "schema": {"type": "number", "exclusiveMinimum": 0},
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _reference("Request")}}},
        "responses": {"200": {"description": "The engine's answer."}, **_refusals(*_REFUSALS, schema=error_schema)},
    }


def _refusals(*statuses: int, schema: str = "Error") -> dict[str, Any]:
    """What is refused before its path is known is an `Error` in any API."""
    return {str(status): _json(_REFUSALS[status], *dict.fromkeys((schema, "Error"))) for status in statuses}


def _json(description: str, *schemas: str) -> dict[str, Any]:
    schema = {"anyOf": [*map(_reference, schemas)]} if len(schemas) > 1 else _reference(*schemas)
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}
