"""Watch sessions among the HTTP gateways of an engine: any of them can stream any session.

A session is in the memory of one gateway. Its name has the number of the gateway that made it. A stream that
begins at another gateway takes the session over: it asks the maker, and goes on to the gateway that each
answer names. The gateway that has the session ends its stream, gives it away, and remembers where it went.

A session counts its moves, and a pointer has the count with which the session left. So each pointer of a
search leads to a later owner than the one before, and the search ends at the present one. A gateway that is
asked for a session of a higher count than that of its own pointer is about to receive it, and answers when it
has come. It waits for a message that is on its way, so gateways never wait for each other in a circle.

A pointer is forgotten WATCH_SESSION_TTL_MS after it was last renewed. The gateway that has a session renews
the pointer of its maker, and tells it to the maker's successor: a session is lost only with the gateway that
has it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ringlog.access.keys import Principal
from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.siblings.messages import (
    FindSession,
    FoundSession,
    ListSessions,
    SessionsHeld,
    SessionState,
    SiblingReply,
    SiblingRequest,
    TopicPosition,
)
from ringlog.actors.http_gateway.siblings.siblings import Siblings
from ringlog.actors.http_gateway.streams.fan_out import Projection, Subscriber
from ringlog.actors.http_gateway.streams.watches import WatchSession, WatchSessions, maker_of
from ringlog.client.read.pages import Cursor, Filters, tag_filter
from ringlog.errors import NotReady, Unauthorized
from ringlog.limits import (
    HTTP_SESSION_HOPS_MAX,
    HTTP_SESSIONS_MOVED_MAX,
    HTTP_SESSIONS_PER_NOTICE_MAX,
    HTTP_SESSIONS_RENEWED_MS,
    HTTP_SIBLING_MS_MAX,
    READ_BYTES_MAX,
    READ_LIMIT_MAX,
    WATCH_SESSION_TTL_MS,
)

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

_NOBODY = -1
_WAIT_S = HTTP_SIBLING_MS_MAX / 1_000


class SessionPointer(NamedTuple):
    """Where a session is that is not here."""

    holder: int
    """Number of the gateway."""
    moves: int
    """How often the session had moved when it came there."""
    known_ms: int = 0
    """When this was last known."""


class SessionMoves:
    """Finds sessions at other gateways, takes them over, and gives away those of this one."""

    def __init__(self, gateway: Gateway, sessions: WatchSessions, siblings: Siblings) -> None:
        self._gateway, self._sessions, self._siblings = gateway, sessions, siblings
        self._moved: OrderedDict[str, SessionPointer] = OrderedDict()
        """By wid: where sessions are. The oldest pointer comes first. At most HTTP_SESSIONS_MOVED_MAX."""
        self._searches: dict[tuple[str, str], asyncio.Task[WatchSession]] = {}
        """Sessions that are being taken over, by wid and name of the key."""

    # -- for requests of clients ----------------------------------------------------------------------

    def find(self, wid: str, principal: Principal) -> WatchSession | None:
        """Return a session of this gateway. None: another gateway may have it.

        Raises HttpError 404 if none can have it, Unauthorized if it belongs to another key.
        """
        session = self._sessions.find(wid)
        if session is None:
            if not self._starts(wid):
                raise _absent()
        elif session.principal.name != principal.name:
            raise _foreign()
        return session

    async def require(self, wid: str, principal: Principal) -> None:
        """Check that a session exists, and leave it where it is. Raises as `find` does, and NotReady."""
        if self.find(wid, principal) is None:
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._search(wid, principal, _NOBODY)
            except TimeoutError:
                raise _silent() from None

    async def take(self, wid: str, principal: Principal) -> WatchSession | None:
        """Return a session, which is here from now on. Its stream at another gateway ends.

        None: a later request has taken it already.

        Raises:
            HttpError: 404, it is not known, or was lost with the gateway that had it.
            Unauthorized: It belongs to another key.
            NotReady: A gateway does not answer within HTTP_SIBLING_MS_MAX. It may still give the session away
                later. Then the session is here.
            Throttled: `http.max_watch_sessions` is reached here.
        """
        session = self.find(wid, principal)
        if session is not None:
            return session
        key = wid, principal.name
        search = self._searches.get(key)
        if search is None:
            self._sessions.require_room(len(self._searches))
            search = self._searches[key] = asyncio.ensure_future(self._taken(wid, principal))
            search.add_done_callback(lambda done: self._end_search(key, done))
        # The search goes on if this request ends: the session may be on its way.
        await asyncio.wait((search,), timeout=_WAIT_S)
        if not search.done():
            raise _silent()
        search.result()
        return self._sessions.find(wid)

    def close(self) -> None:
        """End all searches: the process ends."""
        for search in tuple(self._searches.values()):
            search.cancel()

    def _end_search(self, key: tuple[str, str], done: asyncio.Task[WatchSession]) -> None:
        del self._searches[key]
        if not done.cancelled():
            done.exception()  # A request that still waits raises it.

    async def _taken(self, wid: str, principal: Principal) -> WatchSession:
        found = await self._search(wid, principal, self._siblings.number)
        assert found.state is not None
        session = session_of(wid, principal, found.state)
        self._moved.pop(wid, None)
        self._sessions.add(session)
        maker = maker_of(wid, self._siblings.processes)
        if maker != self._siblings.number:
            self._siblings.tell(maker, SessionsHeld(self._siblings.number, [(wid, session.moves)]))
        return session

    def _starts(self, wid: str) -> list[SessionPointer]:
        """Return the other gateways that may know where a session is."""
        moved, maker = self._moved.get(wid), maker_of(wid, self._siblings.processes)
        found = [] if moved is None else [moved]
        return found + [SessionPointer(maker, 0)] * (maker not in {_NOBODY, self._siblings.number})

    async def _search(self, wid: str, principal: Principal, taker: int) -> FoundSession:
        """Follow the pointers to a session. Returns FoundSession `here` or `given`."""
        for start in self._starts(wid):
            at = start
            for _ in range(HTTP_SESSION_HOPS_MAX):
                found = await self._ask(at.holder, FindSession(wid, principal.name, taker, at.moves))
                if found.what == "absent":
                    break
                if found.what != "moved":
                    return found
                at = SessionPointer(found.holder, found.moves)
            else:
                raise _silent()
        raise _absent()

    async def _ask(self, number: int, request: FindSession) -> FoundSession:
        """Return the answer of a gateway: `here`, `given`, `moved` or `absent`."""
        siblings = self._siblings
        # A pointer to this gateway is older than what this gateway knows.
        if number not in siblings.pages or siblings.is_given_up(number):
            return FoundSession("absent")
        try:
            found = await siblings.ask(number, request)
        except OSError:
            if siblings.is_given_up(number):
                return FoundSession("absent")
            raise _silent() from None
        if not isinstance(found, FoundSession) or found.what == "busy":
            raise _silent()
        if found.what == "foreign":
            raise _foreign()
        return found

    # -- for other gateways ---------------------------------------------------------------------------

    async def answer(self, request: SiblingRequest) -> SiblingReply:
        """Answer a request of another gateway."""
        if isinstance(request, ListSessions):
            return SessionsHeld(self._siblings.number, self._held_of(request.maker)[:HTTP_SESSIONS_MOVED_MAX])
        search = self._searches.get((request.wid, request.principal))
        found = self._found(request)
        if found.what == "absent" and request.moves and search is not None:
            await asyncio.wait((search,), timeout=_WAIT_S)
            found = self._found(request) if search.done() else FoundSession("busy")
        return found

    def _found(self, request: FindSession) -> FoundSession:
        session, moved = self._sessions.find(request.wid), self._moved.get(request.wid)
        if session is None:
            if moved is None or moved.moves <= request.moves:
                return FoundSession("absent")
            return FoundSession("moved", moved.holder, moved.moves)
        if session.principal.name != request.principal:
            return FoundSession("foreign")
        if request.taker == _NOBODY:
            return FoundSession("here")
        self._sessions.remove(session)
        session.moves += 1
        self._note_moved(session.wid, SessionPointer(request.taker, session.moves, self._now_ms()))
        return FoundSession("given", state=state_of(session))

    def note_held(self, notice: SessionsHeld) -> None:
        """Note where sessions are that this gateway has made."""
        now_ms = self._now_ms()
        for wid, moves in notice.sessions:
            moved = self._moved.get(wid)
            if self._sessions.find(wid) is None and (moved is None or moves >= moved.moves):
                self._note_moved(wid, SessionPointer(notice.holder, moves, now_ms))

    def _note_moved(self, wid: str, pointer: SessionPointer) -> None:
        moved = self._moved
        moved.pop(wid, None)
        moved[wid] = pointer
        oldest_ms = pointer.known_ms - WATCH_SESSION_TTL_MS
        while len(moved) > HTTP_SESSIONS_MOVED_MAX or next(iter(moved.values())).known_ms < oldest_ms:
            moved.popitem(last=False)

    def _now_ms(self) -> int:
        return int(self._gateway.clock.monotonic_ns() // 1_000_000)

    # -- pointers of makers ---------------------------------------------------------------------------

    async def recover(self) -> None:
        """Ask the other gateways which sessions of a predecessor they have. Raises no error."""
        own = self._siblings.number

        async def ask(number: int) -> None:
            try:
                async with asyncio.timeout(_WAIT_S):
                    found = await self._siblings.ask(number, ListSessions(own))
            except (OSError, TimeoutError):
                return
            if isinstance(found, SessionsHeld):
                self.note_held(found)

        # Those that do not serve have no sessions.
        await asyncio.gather(*(ask(n) for n in self._siblings.pages if self._siblings.is_ready(n)))

    def keep_renewing(self) -> None:
        """Renew the pointers of the makers from now on, if there are other gateways."""
        if self._siblings.pages:
            for maker in self._siblings.pages:
                held = self._held_of(maker)
                for at in range(0, len(held), HTTP_SESSIONS_PER_NOTICE_MAX):
                    part = held[at : at + HTTP_SESSIONS_PER_NOTICE_MAX]
                    self._siblings.tell(maker, SessionsHeld(self._siblings.number, part))
            self._gateway.loop.call_later(HTTP_SESSIONS_RENEWED_MS / 1_000, self.keep_renewing)

    def _held_of(self, maker: int) -> list[tuple[str, int]]:
        made = self._sessions.made_by(maker, self._siblings.processes)
        return [(session.wid, session.moves) for session in made]


def state_of(session: WatchSession) -> SessionState:
    """Return what another gateway needs to continue a session."""
    state = SessionState(
        session.moves, session.heartbeat_s, session.is_strong, READ_LIMIT_MAX, READ_BYTES_MAX,
        include_data=True, include_tags=False, include_meta=True, tags=session.tags, nodes=[], positions=[],
    )  # fmt: skip
    for sub in session.subs.values():  # They differ in their positions, and some topics ignore nodes.
        shown, nodes = sub.projection, sub.projection.filters.nodes
        state.limit, state.max_bytes = sub.limit, sub.max_bytes
        state.include_data, state.include_tags = shown.include_data, shown.include_tags
        state.include_meta = shown.include_meta
        state.nodes = list(nodes) or state.nodes
        state.positions.append(TopicPosition(sub.topic, sub.epoch, sub.seq, sub.head_seq, bool(nodes)))
    return state


def session_of(wid: str, principal: Principal, state: SessionState) -> WatchSession:
    """Return the session that continues where `state_of` ended it."""
    nodes, tag = frozenset(state.nodes), tag_filter(state.tags)
    subs = {}
    for topic, epoch, seq, head_seq, omits_nodes in map(msgspec.structs.astuple, state.positions):
        filters = Filters(nodes if omits_nodes else frozenset(), tag)
        projection = Projection(state.include_data, state.include_tags, state.include_meta, filters)
        subs[topic] = Subscriber(topic, Cursor(epoch, seq), projection, state.limit, state.max_bytes)
        subs[topic].head_seq = head_seq
    session = WatchSession(
        wid, principal, subs, heartbeat_s=state.heartbeat_s, is_strong=state.is_strong, tags=state.tags
    )
    session.moves = state.moves
    return session


def _absent() -> HttpError:
    return HttpError(404, "not_found", "no such watch session: make one with POST /v0/watch")


def _foreign() -> Unauthorized:
    return Unauthorized("a watch session belongs to the key that made it")


def _silent() -> NotReady:
    return NotReady(
        "the gateway process with this watch session does not answer: retry later",
        timeout_ms=HTTP_SIBLING_MS_MAX, retry_after_ms=1_000,
    )  # fmt: skip
