"""All routes of the HTTP gateway."""

from __future__ import annotations

from ringlog.actors.http_gateway import (
    diffs,
    documents,
    event_stream,
    groups,
    health,
    queues,
    routers,
    topics,
    watches,
    work_stream,
    writes,
)
from ringlog.actors.http_gateway.route_table import Route

ROUTES: tuple[Route, ...] = (
    *health.ROUTES, *topics.ROUTES, *writes.ROUTES, *diffs.ROUTES, *routers.ROUTES, *queues.ROUTES,
    *work_stream.ROUTES, *groups.ROUTES, *watches.ROUTES, *event_stream.ROUTES, *documents.ROUTES,
)  # fmt: skip
