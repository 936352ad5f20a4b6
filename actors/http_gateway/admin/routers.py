"""Routes of routers: create or change, show, list, delete. A key must cover a router and both its topics."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ringlog.access.engine_facts import covers_router, require_router, visible_prefixes, without_hidden_names
from ringlog.access.keys import Principal
from ringlog.actors.http_gateway.admin.topics import PAGE_QUERY, decode_cursor, encode_cursor, page_size
from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.client.connection.session import Session
from ringlog.client.requests import router_requests
from ringlog.client.requests.router_requests import RouterDescription, RouterOptions
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, RouterCycle, RouterNotFound, TopicIncompatible
from ringlog.link.futures import Steps


class RouterBody(msgspec.Struct):
    """Body of a router. On an existing router, what is left out gets its default."""

    source: Annotated[str, Meta(description="Topic to copy from. It is created if it does not exist.")]
    dest: Annotated[str, Meta(description="Topic to copy to.")]
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: Annotated[bool, Meta(description="Create `dest` if it does not exist.")] = True
    filter: Any = None
    """A tag, a prefix of tags that ends in `*`, or ["tag", "Eq" | "Glob", text]."""
    allow_cycle: bool = False
    guarantee: Annotated[str, Meta(description="at_least_once or exactly_once")] = "at_least_once"


async def put_router(request: Request) -> Response:
    """Create a router, or change the options of an existing one."""
    body, name = await request.json(RouterBody), request.topic
    if not (body.source and body.dest):
        raise InvalidRequest(
            "source and dest must be names of topics", field="source" if body.dest else "dest"
        )
    request.authorise(m.RouterCreate(name, body.source, body.dest))
    options = RouterOptions(
        body.filter, body.preserve_node, body.preserve_tag, body.create_dest, body.allow_cycle, body.guarantee
    )
    client = request.gateway.client
    try:
        found = await client.run(
            router_requests.create(client.connection, name, body.source, body.dest, options)
        )
    except (TopicIncompatible, RouterCycle) as e:
        raise without_hidden_names(request.principal, e) from None
    return Response(
        201 if found.created else 200, {"router": name, "created": found.created, **_shape(found)}
    )


async def show_router(request: Request) -> Response:
    """Return a router, after it has forwarded what its source contained at the time of the request."""
    client = request.gateway.client
    found = await client.run(_caught_up(client.connection, request.principal, request.topic))
    return Response(200, {**_shape(found), "cursor": found.cursor, "lag": found.lag})


async def list_routers(request: Request) -> Response:
    """Return one page of the routers that the key covers, in byte order of their names."""
    query, size = request.query, page_size(request)
    after = decode_cursor(query.get("cursor", ""))
    prefixes = visible_prefixes(request.principal, query.get("prefix", ""))
    client = request.gateway.client
    found = await client.run(
        router_requests.list_routers(
            client.connection, prefixes, query.get("source", ""), query.get("dest", ""), after, size + 1,
            lambda each: covers_router(request.principal, each.router, each.source, each.dest),
        )
    )  # fmt: skip
    body: dict[str, Any] = {"routers": [_shape(each) for each in found[:size]]}
    if len(found) > size:
        body["next_cursor"] = encode_cursor(found[size - 1].router)
    return Response(200, body)


async def delete_router(request: Request) -> Response:
    """Delete a router. Copies stay."""
    client, name = request.gateway.client, request.topic
    deleted = await client.run(_deleted(client.connection, request.principal, name))
    return Response(200, {"router": name, "deleted": deleted})


def _caught_up(session: Session, principal: Principal, name: str) -> Steps[RouterDescription]:
    found = yield from _covered(session, principal, name)
    if found.lag:
        info: m.TopicInfo = yield session.topics.resolve(found.dest)
        yield session.catch_up(found.dest, info.topic_id)
        found = yield from _covered(session, principal, name)
    return found


def _deleted(session: Session, principal: Principal, name: str) -> Steps[bool]:
    if principal.prefixes:
        try:
            yield from _covered(session, principal, name)
        except RouterNotFound:
            return False
    return (yield from router_requests.delete(session, name))


def _covered(session: Session, principal: Principal, name: str) -> Steps[RouterDescription]:
    """Return a router. Raises Forbidden unless the key covers both its topics."""
    found = yield from router_requests.get(session, name, 0.0)
    require_router(principal, found.router, found.source, found.dest)
    return found


def _shape(found: RouterDescription) -> dict[str, Any]:
    return {
        "router": found.router, "source": found.source, "dest": found.dest,
        "preserve_node": found.preserve_node, "preserve_tag": found.preserve_tag, "filter": found.filter,
        "allow_cycle": found.allow_cycle, "guarantee": found.guarantee,
        "forwarded_total": found.forwarded_total,
    }  # fmt: skip


def _create_access(router: str) -> m.Message:
    return m.RouterCreate(router, "", "")


_ROUTER = ("router",)
_LIST_QUERY = {"source": "Only routers from this topic.", "dest": "Only routers to this topic.", **PAGE_QUERY}
ROUTES: tuple[Route, ...] = (
    Route("GET", "/v0/routers", list_routers, m.RouterList, "List routers", query=_LIST_QUERY),
    Route(
        "PUT", "/v0/routers/{}", put_router, _create_access, "Create or change a router", body=RouterBody,
        params=_ROUTER, statuses=(201,),
    ),
    Route("GET", "/v0/routers/{}", show_router, m.RouterGet, "Return a router", params=_ROUTER),
    Route("DELETE", "/v0/routers/{}", delete_router, m.RouterDelete, "Delete a router", params=_ROUTER),
)  # fmt: skip
