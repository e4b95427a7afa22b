"""The OpenAPI document of the native calls, made of their types. Pure: no I/O."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from kmqpy.gateway.dialects.native.asked import Endpoint
from kmqpy.queue.shapes import PROBLEM, Problem

_REF = "#/components/schemas/{name}"
_JSON = "application/json"


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The document, by OpenAPI 3.1."""
    types: list[type[Any]] = [Problem]
    for one in endpoints:
        types += [kind for kind in (one.query, one.body, one.answer) if kind not in (None, bytes)]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(f"/v1{one.path}", {})[one.method.lower()] = _operation(one, schemas)
    queries = {one.query.__name__ for one in endpoints}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kmqpy", "version": "1", "summary": "Queues over HTTP."},
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {
            "schemas": {name: schema for name, schema in schemas.items() if name not in queries},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(one: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    if "{queue}" in one.path:
        parameters.append({"name": "queue", "in": "path", "required": True, "schema": _NAME})
    query = schemas[one.query.__name__]
    required = query.get("required", [])
    for name, schema in query["properties"].items():
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": schema})
    if one.body is bytes:
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": _NAME})
    operation: dict[str, Any] = {
        "operationId": one.name,
        "summary": inspect.getdoc(one.do),
        "parameters": parameters,
        "responses": {
            "204" if one.answer is None else "200": _answer(one),
            "default": {"description": "What is wrong.", "content": {PROBLEM: {"schema": _ref(Problem)}}},
        },
    }
    if one.body is bytes:
        operation["requestBody"] = {"content": {"*/*": {}}}
    elif one.body is not None:
        operation["requestBody"] = {"content": {_JSON: {"schema": _ref(one.body)}}}
    return operation


def _answer(one: Endpoint) -> dict[str, Any]:
    if one.answer is None:
        return {"description": "It is done."}
    return {"description": inspect.getdoc(one.answer), "content": {_JSON: {"schema": _ref(one.answer)}}}


def _ref(kind: type[Any]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


_NAME = {"type": "string", "minLength": 1, "maxLength": 200}
