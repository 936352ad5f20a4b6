"""Operations on routers, for both clients: create, inspect, list, delete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ringlog.client.connection.session import Session
from ringlog.client.read.pages import TagFilter
from ringlog.client.requests.validation import (
    SECONDS_MAX,
    check_bool,
    check_int_range,
    check_str,
    check_tag_filter,
    check_timeout,
)
from ringlog.envelope.messages import (
    RouterCreate,
    RouterDelete,
    RouterDeleted,
    RouterGet,
    RouterInfo,
    RouterList,
    RouterListReply,
)
from ringlog.errors import NotReady
from ringlog.limits import LIST_PAGE_MAX, ROUTER_SETTLE_MS_MAX
from ringlog.link.futures import Steps


@dataclass(frozen=True, slots=True)
class RouterDescription:
    """Options and position of a router. `created` is true if this call created it."""

    router: str
    source: str
    dest: str
    created: bool
    filter: tuple[str, ...] | None
    """["tag", "Eq", value], ["tag", "Glob", "prefix*"] or ["tag", "Levels", pattern]; None = every record."""
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    allow_cycle: bool
    guarantee: str
    cursor: int
    """Seq of the source up to which every record was forwarded or skipped."""
    lag: int
    """Number of seqs of the source above `cursor`."""
    forwarded_total: int
    """Number of copies since the creation of the router."""


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options of a router. See Routers.create."""

    filter: TagFilter | None = None
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    guarantee: str = "at_least_once"


def router_description_of(info: RouterInfo) -> RouterDescription:
    """Convert a scheduler's reply to the terms of this library."""
    wanted = None if info.filter is None else tuple(info.filter)
    return RouterDescription(
        info.router, info.source, info.dest, info.created, wanted, info.preserve_node, info.preserve_tag,
        info.create_dest, info.allow_cycle, info.guarantee, info.cursor, info.lag, info.forwarded_total,
    )  # fmt: skip


def create(
    session: Session, name: str, source: str, dest: str, options: RouterOptions
) -> Steps[RouterDescription]:
    """Create a router, or change the options of an existing one."""
    name, source, dest = check_str(name, "name"), check_str(source, "source"), check_str(dest, "dest")
    guarantee = check_str(options.guarantee, "guarantee")
    keeps_node = check_bool(options.preserve_node, "preserve_node")
    keeps_tag = check_bool(options.preserve_tag, "preserve_tag")
    wanted: Any = check_tag_filter(options.filter, "filter")
    if wanted is not None and not isinstance(wanted, str):
        wanted = list(wanted)
    request = RouterCreate(
        name, source, dest, wanted, keeps_node, keeps_tag, check_bool(options.create_dest, "create_dest"),
        check_bool(options.allow_cycle, "allow_cycle"), guarantee,
    )  # fmt: skip
    # The call may create either topic, so their cached descriptions are dropped.
    session.topics.forget(source)
    session.topics.forget(dest)
    return router_description_of((yield session.schedulers.ask(request)))


def get(session: Session, name: str, settle_s: float) -> Steps[RouterDescription]:
    """Return a router, after waiting up to `settle_s` seconds for it to forward what its source contains
    now."""
    found, _ = yield from _settled(session, name, settle_s, "settle_s")
    return found


def settle(session: Session, name: str, timeout_s: float) -> Steps[RouterDescription]:
    """Wait until the router has forwarded every record that its source contains now."""
    found, wanted = yield from _settled(session, name, timeout_s, "timeout_s")
    if found.cursor < wanted:
        raise NotReady(
            "the router still lags after the timeout: retry later", router=name, lag=found.lag, wanted=wanted
        )
    return found


def _settled(
    session: Session, name: str, timeout_s: float, parameter: str
) -> Steps[tuple[RouterDescription, int]]:
    """Return the router at or after the source's current head, or after the timeout; and that head."""
    name, wait_s = check_str(name, "name"), check_timeout(timeout_s, parameter)
    deadline_ns = session.clock.monotonic_ns() + round((SECONDS_MAX if wait_s is None else wait_s) * 1e9)
    info: RouterInfo = yield session.schedulers.ask(RouterGet(name))
    wanted = info.cursor + info.lag
    while info.cursor < wanted:
        left_ms = (deadline_ns - session.clock.monotonic_ns()) // 1_000_000
        if left_ms <= 0:
            break
        slice_ms = min(left_ms, ROUTER_SETTLE_MS_MAX)
        info = yield session.schedulers.ask(RouterGet(name, slice_ms, wanted), extra_ms=slice_ms)
    return router_description_of(info), wanted


def delete(session: Session, name: str) -> Steps[bool]:
    """Delete a router. Returns False if it did not exist."""
    reply: RouterDeleted = yield session.schedulers.ask(RouterDelete(check_str(name, "name")))
    return reply.deleted


def list_routers(
    session: Session, prefixes: Iterable[str], source: str, dest: str, after: str, count: int,
    is_wanted: Callable[[RouterDescription], bool],
) -> Steps[list[RouterDescription]]:  # fmt: skip
    """Return the first `count` wanted routers above the name `after` that begin with one of the prefixes.

    The prefixes ascend, and none begins with another one: then the routers are in order of their names.
    """
    found: list[RouterDescription] = []
    for prefix in prefixes:
        pages = RouterPages(prefix, source, dest, min(count, LIST_PAGE_MAX), after)
        while len(found) < count and (page := (yield from pages.next_page(session))):
            found += filter(is_wanted, page)
    return found[:count]


class RouterPages:
    """Routers page by page, in order of their names."""

    def __init__(self, prefix: str, source: str, dest: str, page_size: int, after: str = "") -> None:
        self._wanted = (check_str(prefix, "prefix"), check_str(source, "source"), check_str(dest, "dest"))
        self._page_size = check_int_range(page_size, "page_size", 1, LIST_PAGE_MAX)
        self._after = after
        self._has_more = True

    def next_page(self, session: Session) -> Steps[list[RouterDescription]]:
        """Return the next routers; an empty list after the last one."""
        if not self._has_more:
            return []
        request = RouterList(*self._wanted, self._after, self._page_size)
        reply: RouterListReply = yield session.schedulers.ask(request)
        self._has_more = reply.more and bool(reply.routers)
        if reply.routers:
            self._after = reply.routers[-1].router
        return [router_description_of(info) for info in reply.routers]
