"""Broken connections: during traffic, in one direction only, at every byte of a request and a reply."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from chaos.attack.arena import ANSWER_S, Arena, a_frame, ask, data_of, hear, hello
from chaos.network.proxy import DOWN, UP, Proxy
from ringlog.client import Client
from ringlog.drill.checks import require
from ringlog.envelope import messages as m
from ringlog.envelope.wire import encode
from ringlog.errors import ConnectionTrouble, Refused, RinglogError
from ringlog.frame.settle_entry import FLAG_DEDUPED, FLAGS_SHIFT, S_COUNT_STATUS, STATUS_SHIFT
from ringlog.testing.real_engine import wait_until

RESULT_S = 30.0
"""Time (s) after the last fault within which every ticket resolves."""
STORMS = 12
RECORDS_PER_STORM = 100
PAYLOAD_BYTES = 200
CALM_MS = 30, 150
STORM_MS = 5, 60


@dataclass(slots=True)
class History:
    """The outcomes of one producer's payloads."""

    acked: list[bytes] = field(default_factory=list)
    unknown: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)

    def note(self, payload: bytes, ticket: Any) -> None:
        """Wait for the outcome of one payload."""
        try:
            ticket.result(RESULT_S)
        except ConnectionTrouble as e:
            (self.unknown if e.outcome == "unknown" else self.refused).append(payload)
        except Refused:
            self.refused.append(payload)
        else:
            self.acked.append(payload)

    def judge(self, stored: list[bytes]) -> None:
        """Compare the outcomes with the stored payloads. Raises GuaranteeBroken on a difference.

        Acked payloads exist once and in order, refused ones do not exist, unknown ones exist at most once. No
        other payload exists.
        """
        require(len(set(stored)) == len(stored), f"{len(stored) - len(set(stored))} records are there twice")
        there = set(stored)
        lost = [payload for payload in self.acked if payload not in there]
        require(not lost, f"{len(lost)} acked records are missing: {lost[:3]!r}")
        require(not there & set(self.refused), "a refused record was stored")
        strange = there - set(self.acked) - set(self.unknown)
        require(not strange, f"{len(strange)} records were never sent: {list(strange)[:3]!r}")
        order = [payload for payload in stored if payload in set(self.acked)]
        require(order == self.acked, "acked records are not in the order in which they were sent")


def stored_in(arena: Arena, topic: str) -> list[bytes]:
    """Return every payload, read over an undisturbed connection."""
    with arena.connect() as client:
        return [data_of(record) for record in client.reader(topic)]


def _topic(arena: Arena, name: str) -> str:
    with arena.connect() as client:
        client.topics.create(name, durability="fsync", exist_ok=True)
    return name


def partitions(arena: Arena, dice: random.Random) -> int:
    """Reset connections at random moments of a stream of appends, and refuse new ones for a while (RF-88)."""
    topic = _topic(arena, f"net.partition.{dice.getrandbits(32):x}")
    return _through_storms(arena, dice, topic, _reset_storm)


def one_way(arena: Arena, dice: random.Random) -> int:
    """Deliver requests but hold replies; then reset, so that the client resends pending requests (RF-89)."""
    topic = _topic(arena, f"net.oneway.{dice.getrandbits(32):x}")
    return _through_storms(arena, dice, topic, _mute_storm)


def _through_storms(arena: Arena, dice: random.Random, topic: str, storm: Any) -> int:
    history = History()
    with Proxy(arena.port, dice.getrandbits(32)) as proxy, arena.connect(port=proxy.port) as client:
        _send_through(client, topic, dice, proxy, storm, history)
        require(proxy.resets >= STORMS // 2, f"only {proxy.resets} connections were cut")
    require(
        len(history.acked) >= STORMS * RECORDS_PER_STORM // 2, f"only {len(history.acked)} appends were acked"
    )
    history.judge(stored_in(arena, topic))
    return STORMS


def _send_through(
    client: Client, topic: str, dice: random.Random, proxy: Proxy, storm: Any, history: History
) -> None:
    open_tickets = []
    with client.producer(topic, linger_ms=0, max_frame_records=5) as out:
        for number in range(STORMS):
            for i in range(RECORDS_PER_STORM):
                payload = b"%d-%d " % (number, i) + dice.randbytes(PAYLOAD_BYTES)
                open_tickets.append((payload, out.send(payload)))
                if i == RECORDS_PER_STORM // 2:
                    storm(proxy, dice)
            # Some requests should get their reply in between, others not.
            time.sleep(dice.uniform(*CALM_MS) / 1_000)
        for payload, ticket in open_tickets:
            history.note(payload, ticket)


def _reset_storm(proxy: Proxy, dice: random.Random) -> None:
    proxy.weather.refuses = True
    time.sleep(dice.uniform(*STORM_MS) / 1_000)
    proxy.cut_all()
    time.sleep(dice.uniform(*STORM_MS) / 1_000)
    proxy.weather.refuses = False


def _mute_storm(proxy: Proxy, dice: random.Random) -> None:
    proxy.weather.holds = {DOWN}
    time.sleep(dice.uniform(*CALM_MS) / 1_000)
    proxy.cut_all()
    proxy.weather.holds = set()


# -- every byte -------------------------------------------------------------------------------------------


def every_byte(arena: Arena, dice: random.Random, *, step: int = 1) -> int:
    """Cut a request and a reply after each byte (RF-91).

    A cut request is not applied, and is applied once when it is resent. A cut reply belongs to a request that
    was applied once.
    """
    topic = _topic(arena, f"net.bytes.{dice.getrandbits(32):x}")
    with Proxy(arena.port) as proxy, arena.peer(key=arena.owner) as direct:
        info = ask(direct, [encode(m.TopicResolve(topic), 1)])
        assert isinstance(info, m.TopicInfo)
        up, down = _measured(arena, proxy, info)
        require(up > 150 and down > 100, f"an append of {up} and {down} bytes: not what was to be measured")
        cases = 1
        for direction, size in ((UP, up), (DOWN, down)):
            for at in range(0, size, step):
                cases += 1
                _cut_at(arena, proxy, direct, info, direction, at, cases)
        state = ask(direct, [encode(m.TopicState(topic), 1)])
        require(
            isinstance(state, m.TopicStateReply) and state.count == cases, f"{cases} appends made {state!r}"
        )
    require(len(set(stored_in(arena, topic))) == cases, "some record is there twice")
    return cases


def _request(info: m.TopicInfo, number: int) -> list[bytes]:
    made = a_frame(
        b"%06d" % number, topic_id=info.topic_id, epoch=info.epoch, producer_id=1_000, producer_seq=number
    )
    return [encode(m.Append(info.topic, 1), 1), made]


def _measured(arena: Arena, proxy: Proxy, info: m.TopicInfo) -> tuple[int, int]:
    with arena.peer(f"tcp://127.0.0.1:{proxy.port}", arena.owner, RECONNECT_IVL=-1) as peer:
        require(hello(peer), "a client behind the proxy is not served")
        proxy.count_from_here()
        require(isinstance(ask(peer, _request(info, 1)), m.Appended), "an append through the proxy failed")
        return proxy.passed(UP), proxy.passed(DOWN)


def _cut_at(
    arena: Arena, proxy: Proxy, direct: Any, info: m.TopicInfo, direction: str, at: int, number: int
) -> None:
    resets = proxy.resets
    with arena.peer(f"tcp://127.0.0.1:{proxy.port}", arena.owner, RECONNECT_IVL=-1) as peer:
        require(hello(peer), "a client behind the proxy is not served")
        proxy.count_from_here()
        proxy.weather.cut_after[direction] = at
        peer.send_multipart(_request(info, number))
        wait_until(lambda: proxy.resets > resets, ANSWER_S, f"the cut {direction} after byte {at}")
        require(
            hear(peer, 0) is None or direction == UP,
            f"a reply cut after byte {at} was accepted as complete",
        )
    again = ask(direct, _request(info, number))
    assert isinstance(again, m.Appended), again
    word = int.from_bytes(again.entries[8 * S_COUNT_STATUS : 8 * S_COUNT_STATUS + 8], "little")
    require(not word >> STATUS_SHIFT & 0xFFFF, f"sent again after a cut {direction} at {at}: {again!r}")
    is_repeat = bool(word >> FLAGS_SHIFT & FLAG_DEDUPED)
    require(not (is_repeat and direction == UP), f"{at} bytes of a request were enough to apply it")


def reads(arena: Arena, dice: random.Random, *, cuts: int = 40) -> int:
    """Cut read replies at random bytes. The reader receives each record once and in order (RF-88)."""
    topic = _topic(arena, f"net.read.{dice.getrandbits(32):x}")
    payloads = [b"%06d" % n + dice.randbytes(2_000) for n in range(1_000)]
    with arena.connect() as client, client.producer(topic) as out:
        out.send_many(payloads).result(RESULT_S)
    with Proxy(arena.port) as proxy, arena.connect(port=proxy.port) as client:
        found: list[bytes] = []
        while len(found) < len(payloads):
            if proxy.resets < cuts:
                proxy.count_from_here()
                proxy.weather.cut_after = {DOWN: dice.randrange(20_000)}
            try:
                page = client.read(topic, len(found), limit=50)
            except RinglogError:
                continue
            found += [data_of(record) for record in page]
        require(found == payloads, "records are missing, duplicated or out of order")
        return proxy.resets
