"""The API documents, made from the route table: OpenAPI for requests, AsyncAPI for streams and WebSocket."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Raw

from ringlog import __version__, errors
from ringlog.access.keys import ANYONE
from ringlog.actors.http_gateway.api.channel_messages import CHANNELS, Channel
from ringlog.actors.http_gateway.api.request import JSON, Request, Response
from ringlog.actors.http_gateway.api.route_table import NAME, Route

_SCHEMAS = "#/components/schemas/{name}"
_EVENTS = "text/event-stream"
_HTTP_ONLY = {
    401: ("unauthorized",), 404: ("not_found",), 405: ("method_not_allowed",), 406: ("not_acceptable",),
    408: ("request_timeout",), 415: ("unsupported_media_type",),
}  # fmt: skip
"""Codes of refusals that only HTTP has, by status."""


class Error(msgspec.Struct):
    """What was wrong. Clients branch on `code`, never on `message`."""

    code: str
    message: str
    detail: dict[str, Any] = {}


class ErrorBody(msgspec.Struct):
    """Body of every response with a status of 400 or more."""

    error: Error


# -- OpenAPI --------------------------------------------------------------------------------------


def openapi(routes: Iterable[Route], *, has_keys: bool = True) -> dict[str, Any]:
    """Return the OpenAPI document of the routes. `has_keys`: whether requests need a key."""
    found = tuple(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in found:
        path = shown_path(route)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _params(route)
        ]
        entry = paths.setdefault(path, {"parameters": parameters} if parameters else {})
        entry[route.method.lower()] = _operation(route, path)
    bodies = [_body_of(route) for route in found if route.body is not None]
    others = [kind for route in found for kind in (*route.takes.values(), *route.gives.values())]
    return {
        "openapi": "3.1.0",
        "info": {"title": "ringlog", "version": __version__},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}] if has_keys else [],
        "paths": paths,
        "components": {
            "schemas": schemas([*bodies, *others, ErrorBody]),
            "responses": {f"Error{status}": _error_response(status) for status in sorted(codes_by_status())},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }  # fmt: skip


def _operation(route: Route, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "summary": route.summary,
        "tags": [_tag(route)],
        "responses": _responses(route),
    }
    if route.is_probe and route.access is None:
        found["security"] = [{}]
    if route.query:
        found["parameters"] = [
            {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
            for name, text in route.query.items()
        ]
    if route.body is not None:
        schema = {"$ref": _SCHEMAS.format(name=_body_of(route).__name__)}
        content = {JSON: {"schema": schema}} | _contents(route.takes)
        found["requestBody"] = {"content": content, "required": _is_required(route.body)}
    return found


def _responses(route: Route) -> dict[str, Any]:
    kind = _EVENTS if route.is_stream else route.reply_type
    content = {kind: {"schema": {"type": "object"}} if kind == JSON else {}} | _contents(route.gives)
    found: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    if 201 in route.statuses:
        found["201"] = {"description": "Created.", "content": content}
    for status in _error_statuses(route):
        found[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    return found


def _contents(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of contents by content type."""
    return {
        name: {"schema": msgspec.json.schema_components([kind], ref_template=_SCHEMAS)[0][0]}
        for name, kind in kinds.items()
    }


def _error_statuses(route: Route) -> list[int]:
    found = {401, 500, 503, *(status for status in route.statuses if status >= 400)}
    if not route.is_probe:
        found |= {400, 403, 429}
    if route.params:
        found |= {404, 409}
    if route.body is not None:
        found |= {408, 413, 415}
    if route.is_stream:
        found.add(406)
    return sorted(found)


def _error_response(status: int) -> dict[str, Any]:
    codes = ", ".join(codes_by_status()[status])
    schema = {"$ref": _SCHEMAS.format(name=ErrorBody.__name__)}
    return {"description": f"Code: {codes}.", "content": {JSON: {"schema": schema}}}


@cache
def codes_by_status() -> dict[int, list[str]]:
    """Return the codes of errors by HTTP status, from the classes of errors."""
    found = {status: list(codes) for status, codes in _HTTP_ONLY.items()}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.Refused) and kind is not errors.Refused:
            codes = found.setdefault(kind.http, [])
            if kind.code not in codes:
                codes.append(kind.code)
    return found


def shown_path(route: Route) -> str:
    """Return the path with the names of its parts: `/v0/topics/{topic}`."""
    path = route.path
    for name in _params(route):
        path = path.replace(NAME, "\0" + name + "\1", 1)
    return path.replace("\0", "{").replace("\1", "}")


def _params(route: Route) -> tuple[str, ...]:
    count = route.path.count(NAME)
    return route.params if len(route.params) == count else tuple(f"name{n + 1}" for n in range(count))


def _tag(route: Route) -> str:
    parts = route.path.strip("/").split("/")
    return parts[1] if len(parts) > 1 and parts[1] in {"topics", "routers", "watch"} else "operations"


# -- schemas --------------------------------------------------------------------------------------


def schemas(kinds: Iterable[Any]) -> dict[str, Any]:
    """Return the JSON schemas of Structs by name."""
    _, found = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    return dict(found)


def _body_of(route: Route) -> Any:
    kind: Any = route.body
    return documented(kind)


_KIND_OF_NAME: dict[str, Any] = {}
"""Structs in the documents by name. Of two with one name the second has the name of its module before it."""


@cache
def documented(kind: Any) -> Any:
    """Return a Struct like this one, with values of any kind where it keeps undecoded JSON."""
    name = str(kind.__name__)
    if _KIND_OF_NAME.setdefault(name, kind) is not kind:
        name = kind.__module__.rpartition(".")[2].title().replace("_", "") + name
    hints = get_type_hints(kind, include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for each in msgspec.structs.fields(kind):
        default = each.default
        if default is NODEFAULT and each.default_factory is not NODEFAULT:
            default = msgspec.field(default_factory=each.default_factory)
        elif isinstance(default, Raw):
            default = None
        fields.append((each.name, _decoded(hints[each.name]), default))
    names = {each.name: each.encode_name for each in msgspec.structs.fields(kind)}
    made = msgspec.defstruct(
        name, [each[:2] if each[2] is NODEFAULT else each for each in fields], rename=names, kw_only=True,
    )  # fmt: skip
    made.__doc__ = kind.__doc__
    return made


def _decoded(hint: Any) -> Any:
    """Return a type with Any for undecoded JSON, and with documented Structs."""
    if hint is Raw:
        return Any
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return documented(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None or origin is Literal:
        return hint
    if origin is Annotated:
        return Annotated[(_decoded(inner[0]), *inner[1:])]
    changed = tuple(map(_decoded, inner))
    return Union[changed] if origin in {Union, types.UnionType} else origin[changed]  # noqa: UP007


def _is_required(body: Any) -> bool:
    return any(each.required for each in msgspec.structs.fields(body))


# -- AsyncAPI -------------------------------------------------------------------------------------


def asyncapi(channels: Iterable[Channel]) -> dict[str, Any]:
    """Return the AsyncAPI document of the event streams and the WebSocket."""
    shown: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    kinds: list[Any] = []
    for channel in channels:
        refs: dict[str, Any] = {}
        for action, group in (("send", channel.sent), ("receive", channel.received)):
            for name, kind in group.items():
                shown_kind = documented(kind)
                kinds.append(shown_kind)
                key = f"{channel.name}.{name}"
                payload = {"$ref": _SCHEMAS.format(name=shown_kind.__name__)}
                messages[key] = {"name": name, "contentType": JSON, "payload": payload}
                refs[name] = {"$ref": f"#/components/messages/{key}"}
            if group:
                operations[f"{channel.name}.{action}"] = {
                    "action": action,
                    "channel": {"$ref": f"#/channels/{channel.name}"},
                    "messages": [{"$ref": f"#/channels/{channel.name}/messages/{name}"} for name in group],
                }
        shown[channel.name] = {"address": channel.address, "description": channel.text, "messages": refs}
        if channel.parameters:
            shown[channel.name]["parameters"] = {
                name: {"description": text} for name, text in channel.parameters.items()
            }
    return {
        "asyncapi": "3.1.0",
        "info": {"title": "ringlog", "version": __version__},
        "defaultContentType": JSON,
        "channels": shown,
        "operations": operations,
        "components": {
            "messages": messages, "schemas": schemas(kinds),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }  # fmt: skip


# -- handlers -------------------------------------------------------------------------------------


@cache
def _openapi_bytes(has_keys: bool) -> bytes:
    from ringlog.actors.http_gateway.routes import ROUTES as ALL  # The table has these routes, too.

    return msgspec.json.encode(openapi(ALL, has_keys=has_keys))


@cache
def _asyncapi_bytes() -> bytes:
    return msgspec.json.encode(asyncapi(CHANNELS))


async def _show_openapi(request: Request) -> Response:
    return Response(200, _openapi_bytes(request.principal is not ANYONE))


async def _show_asyncapi(_: Request) -> Response:
    return Response(200, _asyncapi_bytes())


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v0/openapi.json", _show_openapi, None, "Return the OpenAPI document"),
    Route("GET", "/v0/asyncapi.json", _show_asyncapi, None, "Return the AsyncAPI document"),
)
