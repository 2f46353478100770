"""The router's own OpenAPI document: its paths, what a body must be for the router, and every way in which it says no.

What engines make of a body is theirs to say, and their answers pass through: their schemas are not repeated here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

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


def document(forwarded_paths: Iterable[str]) -> dict[str, Any]:
    """As JSON, of version 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir router", "version": "1"},
        "paths": {
            "/openapi.json": {"get": _told("This document.")},
            **{path: {"get": _told("For load balancers: 503 while the router stops.", 503)} for path in HEALTH_PATHS},
            "/v1/models": {"get": _listing("Lists the models, aliases and adapters.", "Models", ())},
            "/v1/models/{name}": {"get": _listing("Tells of one of them.", "Model", (_NAME,))},
            **{path: {"post": _forwarded()} for path in forwarded_paths},
        },
        "components": {
            "schemas": {"Error": _ERROR, "Model": _MODEL, "Models": _MODELS, "Request": _REQUEST},
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


def _forwarded() -> dict[str, Any]:
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
        "responses": {"200": {"description": "The engine's answer."}, **_refusals(*_REFUSALS)},
    }


def _refusals(*statuses: int) -> dict[str, Any]:
    return {str(status): _json(_REFUSALS[status], "Error") for status in statuses}


def _json(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _reference(schema)}}}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}
