"""Watch sessions among the HTTP gateways of an engine: any of them can stream any session.

A session is in the memory of one gateway. Its name has the number of the gateway that made it. A stream that
begins at another gateway takes the session over: it asks the maker, and goes on to the gateway that each
answer names. The gateway that has the session ends its stream, gives it away, and remembers where it went.

A session counts its moves, and a pointer has the count with which the session left. So each pointer of a
search leads to a later owner than the one before, and the search ends at the present one. A gateway that is
asked for a session of a higher count than that of its own pointer is about to receive it, and answers when it
has come. It waits for a message that is on its way, so gateways never wait for each other in a circle.

A gateway keeps what it has given away until the taker confirms that it has it. If the reply is lost or comes
too late, a repeated request of the taker gets the session again. For any other gateway it is taken back, if
the taker does not know it.

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
from ringlog.actors.http_gateway.siblings import Siblings
from ringlog.actors.http_gateway.streams.session_state import SessionState, session_of, state_of
from ringlog.actors.http_gateway.streams.watches import WatchSession, WatchSessions, maker_of
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, NotReady, RinglogError, Unauthorized
from ringlog.limits import (
    HTTP_SESSION_GIVEN_MS,
    HTTP_SESSION_HOPS_MAX,
    HTTP_SESSIONS_GIVEN_MAX,
    HTTP_SESSIONS_MOVED_MAX,
    HTTP_SESSIONS_PER_NOTICE_MAX,
    HTTP_SESSIONS_RENEWED_MS,
    HTTP_SIBLING_MS_MAX,
    WATCH_SESSION_TTL_MS,
)
from ringlog.link.peer_request import PeerReply

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

_NOBODY = -1
_WAIT_S = HTTP_SIBLING_MS_MAX / 1_000
_ABSENT = PeerReply(m.FoundSession("absent"))
_FOREIGN = PeerReply(m.FoundSession("foreign"))
_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(SessionState).decode
_decode_topics = msgspec.msgpack.Decoder(list[str]).decode
_decode_list = msgspec.msgpack.Decoder(list[tuple[str, int]]).decode


class SessionPointer(NamedTuple):
    """Where a session is that is not here."""

    holder: int
    """Number of the gateway."""
    moves: int
    """How often the session had moved when it came there."""
    known_ms: int = 0
    """When this was last known."""


class GivenSession(NamedTuple):
    """A session that was given away, and has not been confirmed."""

    principal: Principal
    taker: int
    """Number of the gateway that it was given to."""
    state: SessionState
    given_ms: int


class SessionMoves:
    """Finds sessions at other gateways, takes them over, and gives away those of this one."""

    def __init__(self, gateway: Gateway, sessions: WatchSessions, siblings: Siblings) -> None:
        self._gateway, self._sessions, self._siblings = gateway, sessions, siblings
        self._moved: OrderedDict[str, SessionPointer] = OrderedDict()
        """By wid: where sessions are. The oldest pointer comes first. At most HTTP_SESSIONS_MOVED_MAX."""
        self._given: OrderedDict[str, GivenSession] = OrderedDict()
        """By wid, the oldest first. At most HTTP_SESSIONS_GIVEN_MAX."""
        self._untold: dict[int, dict[str, int]] = {}
        """By number of a gateway: sessions that it is to be told of, with their moves. At most
        HTTP_SESSIONS_MOVED_MAX each."""
        self._searches: dict[tuple[str, str], asyncio.Task[None]] = {}
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

    async def topics_of(self, wid: str, principal: Principal) -> list[str]:
        """Return the topics of a session, and leave it where it is. Raises as `find` does, and NotReady.

        An older gateway does not tell them, and what is unknown cannot be authorised. A GET takes such a
        session over, and then its topics are known.
        """
        session = self.find(wid, principal)
        if session is not None:
            return [*session.subs]
        try:
            async with asyncio.timeout(_WAIT_S):
                _, found = await self._search(wid, principal, _NOBODY)
            if not found.attachment:
                raise _untold()
            return _decode_topics(found.attachment)
        except (TimeoutError, msgspec.DecodeError):
            raise _silent() from None

    async def take(self, wid: str, principal: Principal) -> WatchSession | None:
        """Return a session, which is here from now on. Its stream at another gateway ends.

        None: a later request has taken it already.

        Raises:
            HttpError: 404, it is not known, or was lost with the gateway that had it.
            Unauthorized: It belongs to another key.
            NotReady: A gateway does not answer within HTTP_SIBLING_MS_MAX. A later request finds the session.
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

    def _end_search(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        del self._searches[key]
        if not done.cancelled():
            done.exception()  # A request that still waits raises it.

    async def _taken(self, wid: str, principal: Principal) -> None:
        giver, found = await self._search(wid, principal, self._siblings.number)
        if found.message.what == "here":
            return
        try:
            state = _decode_state(found.attachment or b"")
        except msgspec.DecodeError:
            raise _silent() from None
        moved = self._moved.get(wid)
        if moved is not None and moved.moves > state.moves:
            raise _absent()  # A repeated answer: this gateway has had the session since, and given it away.
        self._moved.pop(wid, None)
        self._given.pop(wid, None)
        self._sessions.add(session_of(wid, principal, state))
        for number in {giver, maker_of(wid, self._siblings.processes)} - {self._siblings.number}:
            self._tell_held(number, [(wid, state.moves)])

    def _starts(self, wid: str) -> list[SessionPointer]:
        """Return the other gateways that may know where a session is."""
        moved, maker = self._moved.get(wid), maker_of(wid, self._siblings.processes)
        found = [] if moved is None else [moved]
        return found + [SessionPointer(maker, 0)] * (maker not in {_NOBODY, self._siblings.number})

    async def _search(self, wid: str, principal: Principal, taker: int) -> tuple[int, PeerReply]:
        """Follow the pointers to a session. Returns a gateway, and its FoundSession `here` or `given`."""
        if await self._took_back(wid) and (session := self.find(wid, principal)) is not None:
            return self._siblings.number, _here(session)
        for start in self._starts(wid):
            at = start
            for _ in range(HTTP_SESSION_HOPS_MAX):
                found = await self._ask(at.holder, m.FindSession(wid, principal.name, taker, at.moves))
                if found.message.what == "absent":
                    break
                if found.message.what != "moved":
                    return at.holder, found
                at = SessionPointer(found.message.holder, found.message.moves)
            else:
                raise _silent()
        raise _absent()

    async def _ask(self, number: int, request: m.FindSession) -> PeerReply:
        """Return the FoundSession of a gateway: `here`, `given`, `moved` or `absent`."""
        siblings = self._siblings
        # A pointer to this gateway is older than what this gateway knows.
        if number not in siblings.pages or siblings.is_given_up(number):
            return _ABSENT
        try:
            found = await siblings.ask(number, request)
        except RinglogError:
            if siblings.is_given_up(number):
                return _ABSENT
            raise _silent() from None
        if not isinstance(found.message, m.FoundSession) or found.message.what == "busy":
            raise _silent()
        if found.message.what == "foreign":
            raise _foreign()
        return found

    # -- for other gateways ---------------------------------------------------------------------------

    async def answer(self, request: m.FindSession | m.ListSessions) -> PeerReply:
        """Answer a request of another gateway."""
        own = self._siblings.number
        if isinstance(request, m.ListSessions):
            held = self._held_of(request.maker)[:HTTP_SESSIONS_MOVED_MAX]
            return PeerReply(m.SessionsListed(own), _encode(held))
        if request.taker != _NOBODY and request.taker not in self._siblings.pages:
            raise InvalidRequest(f"taker must be another HTTP gateway, got {request.taker}", field="taker")
        given = self._given.get(request.wid)
        if given is not None and given.taker != request.taker:
            await self._took_back(request.wid)
        search = self._searches.get((request.wid, request.principal))
        found = self._found(request)
        if found.message.what == "absent" and request.moves and search is not None:
            await asyncio.wait((search,), timeout=_WAIT_S)
            found = self._found(request) if search.done() else PeerReply(m.FoundSession("busy"))
        return found

    def _found(self, request: m.FindSession) -> PeerReply:
        wid, session = request.wid, self._sessions.find(request.wid)
        given, moved = self._given.get(wid), self._moved.get(wid)
        if session is None and given is not None and given.state.moves > request.moves:
            if given.principal.name != request.principal:
                return _FOREIGN
            if given.taker == request.taker:
                # Its first reply may be lost. A new entry: `_took_back` sees that the taker asked meanwhile.
                return self._give(wid, given.principal, given.taker, given.state)
        if session is None:
            if moved is None or moved.moves <= request.moves:
                return _ABSENT
            return PeerReply(m.FoundSession("moved", moved.holder, moved.moves))
        if session.principal.name != request.principal:
            return _FOREIGN
        if request.taker == _NOBODY:
            return _here(session)
        self._sessions.remove(session)
        session.moves += 1
        self._note_moved(wid, SessionPointer(request.taker, session.moves, self._now_ms()))
        return self._give(wid, session.principal, request.taker, state_of(session))

    def _give(self, wid: str, principal: Principal, taker: int, state: SessionState) -> PeerReply:
        """Return the answer that gives a session away, and keep the session until it is confirmed."""
        self._given.pop(wid, None)
        self._given[wid] = GivenSession(principal, taker, state, self._now_ms())
        self._forget_given()
        return PeerReply(m.FoundSession("given"), _encode(state))

    def _forget_given(self) -> None:
        given, oldest_ms = self._given, self._now_ms() - HTTP_SESSION_GIVEN_MS
        while given and (
            len(given) > HTTP_SESSIONS_GIVEN_MAX or next(iter(given.values())).given_ms < oldest_ms
        ):
            given.popitem(last=False)

    async def _took_back(self, wid: str) -> bool:
        """Take a session back if its taker neither has nor expects it. Returns whether that was done."""
        self._forget_given()
        given = self._given.get(wid)
        if given is None:
            return False
        asked = m.FindSession(wid, given.principal.name, _NOBODY, given.state.moves)
        try:
            found = await self._ask(given.taker, asked)
        except (NotReady, Unauthorized):
            return False
        if self._given.get(wid) is not given or self._sessions.find(wid) is not None:
            return False
        # What the taker knows of the session now, it knows because it has got it.
        del self._given[wid]
        if found.message.what != "absent":
            return False
        self._moved.pop(wid, None)
        self._sessions.add(session_of(wid, given.principal, given.state))
        return True

    def note_held(self, holder: int, sessions: list[tuple[str, int]]) -> None:
        """Note where sessions are that this gateway has made or given away."""
        if holder not in self._siblings.pages:
            raise InvalidRequest(f"holder must be another HTTP gateway, got {holder}", field="holder")
        now_ms = self._now_ms()
        for wid, moves in sessions:
            given, moved = self._given.get(wid), self._moved.get(wid)
            if given is not None and moves >= given.state.moves:
                del self._given[wid]
            if self._sessions.find(wid) is None and (moved is None or moves >= moved.moves):
                self._note_moved(wid, SessionPointer(holder, moves, now_ms))

    def _tell_held(self, number: int, held: list[tuple[str, int]]) -> None:
        """Tell a gateway which sessions are here."""
        untold = self._untold.setdefault(number, {})
        untold.update(held[: HTTP_SESSIONS_MOVED_MAX - len(untold)])
        self._siblings.tell(number, self._take_held)

    def _take_held(self, number: int) -> m.SessionsHeld | None:
        untold = self._untold[number]
        part = [untold.popitem() for _ in range(min(len(untold), HTTP_SESSIONS_PER_NOTICE_MAX))]
        return m.SessionsHeld(self._siblings.number, part) if part else None

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
                found = await self._siblings.ask(number, m.ListSessions(own))
                self.note_held(number, _decode_list(found.attachment or b""))
            except (RinglogError, msgspec.DecodeError):
                return

        # Those that do not serve have no sessions.
        await asyncio.gather(*(ask(n) for n in self._siblings.pages if self._siblings.is_ready(n)))

    def keep_renewing(self) -> None:
        """Renew the pointers of the makers from now on, if there are other gateways."""
        if self._siblings.pages:
            self._forget_given()
            for maker in self._siblings.pages:
                self._tell_held(maker, self._held_of(maker))
            self._gateway.loop.call_later(HTTP_SESSIONS_RENEWED_MS / 1_000, self.keep_renewing)

    def _held_of(self, maker: int) -> list[tuple[str, int]]:
        made = self._sessions.made_by(maker, self._siblings.processes)
        return [(session.wid, session.moves) for session in made]


def _here(session: WatchSession) -> PeerReply:
    return PeerReply(m.FoundSession("here"), _encode([*session.subs]))


def _absent() -> HttpError:
    return HttpError(404, "not_found", "no such watch session: make one with POST /v0/watch")


def _foreign() -> Unauthorized:
    return Unauthorized("a watch session belongs to the key that made it")


def _untold() -> NotReady:
    return NotReady(
        "the gateway process with this watch session is of an older release and does not tell its topics: "
        "open the stream with GET, or restart the engine",
        retry_after_ms=1_000,
    )


def _silent() -> NotReady:
    return NotReady(
        "the gateway process with this watch session does not answer: retry later",
        timeout_ms=HTTP_SIBLING_MS_MAX, retry_after_ms=1_000,
    )  # fmt: skip
