"""The table of routes: method and path to a handler, with what its key must be allowed to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.api.request import JSON, Request, Response
from ringlog.envelope.messages import Message
from ringlog.limits import HTTP_PATH_CHARS_KEPT, HTTP_PATHS_MAX

Handler = Callable[[Request], Awaitable[Response | None]]
"""Answers a request. None: it has sent its own response, as streams do."""
Access = Callable[..., Message]
"""From the parts of the path to the message that equals the operation, by which rights are checked."""
NAME = "{}"


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: `PUT /v0/topics/{}`."""

    method: str
    path: str
    """Template: `{}` stands for one part of the path."""
    handler: Handler
    access: Access | None
    """None: open to everybody, as the probes are."""
    summary: str
    """What it does, in the imperative; for the API documents."""
    body: type[Any] | None = None
    """Struct of the request's body, for the API documents."""
    is_stream: bool = False
    """Whether the response is an event stream. Such a route takes the key as query `token` too."""
    is_probe: bool = False
    """Whether it is served while the engine recovers, and without a key."""
    params: tuple[str, ...] = ()
    """Names of the parts, for the API documents."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Query parameters by name, each with its meaning; for the API documents, as is all that follows."""
    statuses: tuple[int, ...] = ()
    """Statuses that most routes do not answer with: 201, and those of refusals that only this one has."""
    reply_type: str = JSON
    """Content type of its replies."""
    takes: Mapping[str, Any] = field(default_factory=dict)
    """Further content types of the request's body, each with the type of what it contains."""
    gives: Mapping[str, Any] = field(default_factory=dict)
    """Further content types of the reply, in the same form."""

    @property
    def name(self) -> str:
        """`METHOD /path`, for metrics and logs."""
        return f"{self.method} {self.path}"


class RouteTable:
    """Finds the route of a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes: tuple[Route, ...] = tuple(routes)
        self._methods: dict[tuple[str, ...], dict[str, Route]] = {}
        """By path, in parts: route by method."""
        patterns: dict[int, dict[tuple[bool, ...], None]] = {}
        for route in self.routes:
            shape = tuple(route.path[1:].split("/"))
            methods = self._methods.setdefault(shape, {})
            assert route.method not in methods, route.name
            methods[route.method] = route
            if NAME in shape:
                patterns.setdefault(len(shape), {})[tuple(part == NAME for part in shape)] = None
        self._patterns = {length: tuple(found) for length, found in patterns.items()}
        """By number of parts: for each set of places of names, whether each part is a name."""
        self._found: dict[tuple[str, str], tuple[Route, tuple[str, ...]]] = {}
        """Answers of `find`, at most HTTP_PATHS_MAX; then they are forgotten."""

    def find(self, method: str, path: str) -> tuple[Route, tuple[str, ...]]:
        """Return the route and the names in its path. Raises HttpError: 404, or 405 with `allow`.

        HEAD is answered like GET; the server leaves the body out.
        """
        known = self._found.get((method, path))
        if known is not None:
            return known
        found = self._find(method, path)
        if len(path) <= HTTP_PATH_CHARS_KEPT:
            if len(self._found) >= HTTP_PATHS_MAX:
                self._found.clear()
            self._found[method, path] = found
        return found

    def _find(self, method: str, path: str) -> tuple[Route, tuple[str, ...]]:
        parts = tuple(path[1:].split("/")) if path.startswith("/") else (path,)
        methods = self._methods.get(parts) if NAME not in parts else None
        names: tuple[str, ...] = ()
        if methods is None:
            for pattern in self._patterns.get(len(parts), ()):
                shape = tuple(
                    [NAME if is_name else part for is_name, part in zip(pattern, parts, strict=True)]
                )
                methods = self._methods.get(shape)
                if methods is not None:
                    names = tuple([part for is_name, part in zip(pattern, parts, strict=True) if is_name])
                    break
        if methods is None or "" in names:
            raise HttpError(404, "not_found", f"no such route: {path[:200]}")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allow = ", ".join(sorted([*methods, *(["HEAD"] if "GET" in methods else [])]))
            raise HttpError(
                405, "method_not_allowed", f"{method[:20]} is not supported here, expected {allow}",
                headers=(("allow", allow),),
            )  # fmt: skip
        return route, names
