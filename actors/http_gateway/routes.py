"""All routes of the HTTP gateway."""

from __future__ import annotations

from ringlog.actors.http_gateway.admin import health, routers, topics
from ringlog.actors.http_gateway.api import documents
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.leases import groups, queues, work_stream
from ringlog.actors.http_gateway.records import diffs, writes
from ringlog.actors.http_gateway.streams import event_stream, watches

ROUTES: tuple[Route, ...] = (
    *health.ROUTES, *topics.ROUTES, *writes.ROUTES, *diffs.ROUTES, *routers.ROUTES, *queues.ROUTES,
    *work_stream.ROUTES, *groups.ROUTES, *watches.ROUTES, *event_stream.ROUTES, *documents.ROUTES,
)  # fmt: skip
