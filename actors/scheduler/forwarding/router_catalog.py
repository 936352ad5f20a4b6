"""Which routers there are, as a whole: what may be made, and what there is to see of them. Pure.

A router's facts are its destination's shard's. This is what one scheduler knows of all of them, which is what
the rules are about: names, sources and destinations, cycles, how many. It is asked of the shards again before
anybody is refused by it, since topics go, and routers with them, without a word to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping

from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, RouterCycle, RouterNotFound, Throttled, TopicIncompatible
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
        """Destination -> names of the routers that lead to it: of one source, all of them."""
        self._dests_by_source: dict[str, Counter[str]] = {}
        """Source -> its destinations, and how many routers lead there."""

    def __len__(self) -> int:
        return len(self._by_name)

    def replace_all(self, found: Iterable[m.RouterFacts]) -> list[m.RouterFacts]:
        """These are all there are. Returns those that must not be: of one name the first made is the
        router."""
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
        """One was made, or is another one from here on."""
        self.drop(facts.name)
        insort(self._names, facts.name)
        self._link(facts)

    def drop(self, name: str) -> None:
        """One is no more."""
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
        """The router of this name."""
        return self._by_name.get(name)

    def require(self, name: str) -> m.RouterFacts:
        """The same; raises RouterNotFound."""
        found = self._by_name.get(name)
        if found is None:
            raise RouterNotFound("no such router", router=name[:256])
        return found

    # -- what may be made -------------------------------------------------------------------------------

    def check_create(self, asked: m.RouterCreate) -> m.RouterFacts | None:
        """May this router be made? The one of its name, if it is there; raises Refused (RT-4 to RT-9)."""
        known = self._by_name.get(asked.router)
        if known is not None and (known.source, known.dest) != (asked.source, asked.dest):
            raise TopicIncompatible(
                "a router keeps its topics", reason="router_repoint_forbidden", router=asked.router,
                existing_source=known.source, existing_dest=known.dest,
            )  # fmt: skip
        if known is not None:
            return known
        if len(self) >= self._max:
            raise Throttled(
                "too many routers", limit="max_routers", max=self._max, retry_after_ms=_RETRY_AFTER_MS
            )
        for name in sorted(self._routers_by_dest.get(asked.dest, ()))[:1]:
            each = self._by_name[name]
            if each.source != asked.source:
                raise TopicIncompatible(
                    "a destination is fed by one source", reason="router_dest_fan_in", router=each.name,
                    existing_source=each.source, dest=asked.dest,
                )  # fmt: skip
        if not asked.allow_cycle:
            cycle = find_cycle(self._dests_by_source, asked.source, asked.dest)
            if cycle:
                raise RouterCycle("the router would close a cycle", router=asked.router, cycle=cycle)
        return None

    # -- what there is to see -----------------------------------------------------------------------------

    def page(self, asked: m.RouterList) -> tuple[list[m.RouterFacts], bool]:
        """One page by name, and whether there is more (RT-3)."""
        size = min(max(asked.page_size, 1), LIST_PAGE_MAX)
        begin = bisect_right(self._names, asked.after) if asked.after else 0
        start = max(bisect_left(self._names, asked.prefix), begin)
        found: list[m.RouterFacts] = []
        for name in self._names[start:]:
            if not name.startswith(asked.prefix):
                break
            facts = self._by_name[name]
            if asked.source not in {"", facts.source} or asked.dest not in {"", facts.dest}:
                continue
            if len(found) == size:
                return found, True
            found.append(facts)
        return found, False


def find_cycle(onward: Mapping[str, Iterable[str]], source: str, dest: str) -> list[str]:
    """The topics along the cycle that an edge from `source` to `dest` would close, `source` first; none =
    []."""
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


def check_request(asked: m.RouterCreate) -> tuple[int, str]:
    """Flags and filter of a router that is asked for; raises InvalidRequest for what none can have."""
    check_router_name(asked.router)
    check_topic_name(asked.source, "source")
    check_topic_name(asked.dest, "dest")
    if asked.source == asked.dest:
        raise InvalidRequest("a router leads to another topic", field="dest", found=asked.dest)
    if asked.guarantee not in {AT_LEAST_ONCE, EXACTLY_ONCE}:
        raise InvalidRequest(
            "unknown guarantee", field="guarantee", found=asked.guarantee[:64],
            known=[AT_LEAST_ONCE, EXACTLY_ONCE],
        )  # fmt: skip
    wanted = (
        (RouterFlag.PRESERVE_NODE, asked.preserve_node), (RouterFlag.PRESERVE_TAG, asked.preserve_tag),
        (RouterFlag.CREATE_DEST, asked.create_dest), (RouterFlag.ALLOW_CYCLE, asked.allow_cycle),
        (RouterFlag.EXACTLY_ONCE, asked.guarantee == EXACTLY_ONCE),
    )  # fmt: skip
    return sum(flag for flag, is_set in wanted if is_set), filter_text(asked.filter)


def router_info(facts: m.RouterFacts, *, created: bool = False, head: int = 0) -> m.RouterInfo:
    """A router as clients see it; `head` is its source's."""
    flags = facts.flags
    return m.RouterInfo(
        facts.name, facts.source, facts.dest, created, request_form(facts.filter),
        bool(flags & RouterFlag.PRESERVE_NODE), bool(flags & RouterFlag.PRESERVE_TAG),
        bool(flags & RouterFlag.CREATE_DEST), bool(flags & RouterFlag.ALLOW_CYCLE),
        EXACTLY_ONCE if flags & RouterFlag.EXACTLY_ONCE else AT_LEAST_ONCE, facts.cursor,
        max(head - facts.cursor, 0), facts.forwarded,
    )  # fmt: skip
