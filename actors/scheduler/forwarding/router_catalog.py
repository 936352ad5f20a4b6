"""Catalog of all routers of an engine: checks of new routers, and lists. Pure.

The shard of the destination owns the facts of a router. The catalog is the copy of scheduler 0. The checks
need all routers: names, sources and destinations, cycles, and their number. Before a request is refused, the
catalog is loaded again from the shards, because a router is deleted with its topic without an announcement.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping

from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, RouterCycle, Throttled, TopicIncompatible
from ringlog.limits import LIST_PAGE_MAX
from ringlog.names import check_topic_name
from ringlog.tags import request_form
from ringlog.topic.routers import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    RouterFlag,
    check_router_name,
    filter_text,
)

_RETRY_AFTER_MS = 1_000


class RouterCatalog:
    """All routers of an engine, by name."""

    def __init__(self, routers_max: int) -> None:
        self._max = routers_max
        self._by_name: dict[str, m.RouterFacts] = {}
        self._names: list[str] = []
        self._routers_by_dest: dict[str, set[str]] = {}
        """Names of the routers into each destination. All of them have the same source."""
        self._dests_by_source: dict[str, Counter[str]] = {}
        """Destinations of each source, with the number of routers between them."""

    def __len__(self) -> int:
        return len(self._by_name)

    def replace_all(self, found: Iterable[m.RouterFacts]) -> list[m.RouterFacts]:
        """Replace all routers.

        If several have one name, keep the oldest and return the others, which must be deleted.
        """
        self._by_name, self._names, self._routers_by_dest, self._dests_by_source = {}, [], {}, {}
        doubled = []
        for facts in sorted(found, key=lambda each: each.router):
            if facts.name in self._by_name:
                doubled.append(facts)
            else:
                self._link(facts)
        self._names = sorted(self._by_name)
        return doubled

    def put(self, facts: m.RouterFacts) -> None:
        """Add or change a router."""
        self.drop(facts.name)
        insort(self._names, facts.name)
        self._link(facts)

    def drop(self, name: str) -> None:
        """Remove a router."""
        facts = self._by_name.pop(name, None)
        if facts is None:
            return
        del self._names[bisect_left(self._names, name)]
        self._routers_by_dest[facts.dest].discard(name)
        onward = self._dests_by_source[facts.source]
        onward[facts.dest] -= 1
        if not onward[facts.dest]:
            del onward[facts.dest]

    def _link(self, facts: m.RouterFacts) -> None:
        self._by_name[facts.name] = facts
        self._routers_by_dest.setdefault(facts.dest, set()).add(facts.name)
        self._dests_by_source.setdefault(facts.source, Counter())[facts.dest] += 1

    def find(self, name: str) -> m.RouterFacts | None:
        """Return the router of this name, or None."""
        return self._by_name.get(name)

    # -- checks of new routers --------------------------------------------------------------------------

    def check_create(self, request: m.RouterCreate) -> m.RouterFacts | None:
        """Check whether this router may be created. Return the existing router of its name, or None.

        Raises:
            TopicIncompatible: the name belongs to a router of other topics, or the destination has another
            source. RouterCycle: the router would close a cycle. Throttled: the engine has the maximum number
            of routers.
        """
        known = self._by_name.get(request.router)
        if known is not None and (known.source, known.dest) != (request.source, request.dest):
            raise TopicIncompatible(
                "source and dest of a router cannot be changed: delete it or use another name",
                reason="router_repoint_forbidden", router=request.router, existing_source=known.source,
                existing_dest=known.dest,
            )  # fmt: skip
        if known is not None:
            return known
        if len(self) >= self._max:
            raise Throttled(
                "too many routers: delete some or raise limits.max_routers", limit="max_routers",
                max=self._max, retry_after_ms=_RETRY_AFTER_MS,
            )  # fmt: skip
        for name in sorted(self._routers_by_dest.get(request.dest, ()))[:1]:
            each = self._by_name[name]
            if each.source != request.source:
                raise TopicIncompatible(
                    "all routers into one destination must have the same source", reason="router_dest_fan_in",
                    router=each.name, existing_source=each.source, dest=request.dest,
                )  # fmt: skip
        if not request.allow_cycle:
            cycle = find_cycle(self._dests_by_source, request.source, request.dest)
            if cycle:
                raise RouterCycle(
                    "the router would close a cycle: set allow_cycle to permit it", router=request.router,
                    cycle=cycle,
                )  # fmt: skip
        return None

    def opposing(self, request: m.RouterCreate, cycle: Iterable[str]) -> list[m.RouterFacts]:
        """Return the routers for which `check_create` refuses a request: that of its name, those to its
        destination, and those to the topics of the cycle."""
        names = {name for dest in {request.dest, *cycle} for name in self._routers_by_dest.get(dest, ())}
        return [self._by_name[name] for name in sorted(names | ({request.router} & self._by_name.keys()))]

    # -- lists --------------------------------------------------------------------------------------------

    def page(self, request: m.RouterList) -> tuple[list[m.RouterFacts], bool]:
        """Return one page in the order of names, and whether more routers follow."""
        size = min(max(request.page_size, 1), LIST_PAGE_MAX)
        begin = bisect_right(self._names, request.after) if request.after else 0
        start = max(bisect_left(self._names, request.prefix), begin)
        found: list[m.RouterFacts] = []
        for name in self._names[start:]:
            if not name.startswith(request.prefix):
                break
            facts = self._by_name[name]
            if request.source not in {"", facts.source} or request.dest not in {"", facts.dest}:
                continue
            if len(found) == size:
                return found, True
            found.append(facts)
        return found, False


def find_cycle(onward: Mapping[str, Iterable[str]], source: str, dest: str) -> list[str]:
    """Return the topics of the cycle that an edge from `source` to `dest` would close, or [].

    `source` is the first and the last one.
    """
    came_from: dict[str, str] = {dest: source}
    ahead = [dest]
    while ahead:
        topic = ahead.pop()
        if topic == source:
            break
        for following in onward.get(topic, ()):
            if following not in came_from:
                came_from[following] = topic
                ahead.append(following)
    if source not in came_from:
        return []
    path = [source]
    at = came_from[source]
    while at != source:
        path.append(at)
        at = came_from[at]
    return [source, *reversed(path[1:]), source]


def check_request(request: m.RouterCreate) -> tuple[int, str]:
    """Return flags and filter of a requested router; raise InvalidRequest if a field is invalid."""
    check_router_name(request.router)
    check_topic_name(request.source, "source")
    check_topic_name(request.dest, "dest")
    if request.source == request.dest:
        raise InvalidRequest(
            f"dest must be another topic than source, got {request.dest!r}", field="dest", found=request.dest
        )
    if request.guarantee not in {AT_LEAST_ONCE, EXACTLY_ONCE}:
        raise InvalidRequest(
            f"guarantee must be {AT_LEAST_ONCE!r} or {EXACTLY_ONCE!r}, got {request.guarantee[:64]!r}",
            field="guarantee", found=request.guarantee[:64], known=[AT_LEAST_ONCE, EXACTLY_ONCE],
        )  # fmt: skip
    wanted = (
        (RouterFlag.PRESERVE_NODE, request.preserve_node), (RouterFlag.PRESERVE_TAG, request.preserve_tag),
        (RouterFlag.CREATE_DEST, request.create_dest), (RouterFlag.ALLOW_CYCLE, request.allow_cycle),
        (RouterFlag.EXACTLY_ONCE, request.guarantee == EXACTLY_ONCE),
    )  # fmt: skip
    return sum(flag for flag, is_set in wanted if is_set), filter_text(request.filter)


def router_info(facts: m.RouterFacts, *, created: bool = False, head: int = 0) -> m.RouterInfo:
    """Return the description of a router for clients. `head` is the head of its source."""
    flags = facts.flags
    return m.RouterInfo(
        facts.name, facts.source, facts.dest, created, request_form(facts.filter),
        bool(flags & RouterFlag.PRESERVE_NODE), bool(flags & RouterFlag.PRESERVE_TAG),
        bool(flags & RouterFlag.CREATE_DEST), bool(flags & RouterFlag.ALLOW_CYCLE),
        EXACTLY_ONCE if flags & RouterFlag.EXACTLY_ONCE else AT_LEAST_ONCE, facts.cursor,
        max(head - facts.cursor, 0), facts.forwarded,
    )  # fmt: skip
