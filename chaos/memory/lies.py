"""Rings with a lying or second producer, or with overwritten bytes. Other clients must not be affected."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import ringlog
from chaos.memory.raw import Opener, RawRing, Scribbler, any_word, twisted
from chaos.rigs.bench import Bench, topics_of
from chaos.rigs.cases import Case
from ringlog.drill.checks import GuaranteeBroken, require
from ringlog.errors import RingError
from ringlog.frame.settle_entry import entry_error
from ringlog.ring import layout
from ringlog.ring.layout import RingWord
from ringlog.ring.producer import RingProducer

LIES = 100
"""Number of lies per case (RF-32). Each has its own ring."""
LIE_S = 0.02
"""Time (s) within which the shard closes a ring because of a lie. If it does not, the lie was harmless."""
SCRIBBLES = 30
SCRIBBLE_EVERY_S = 0.02
HAMMER_S = 1.5
HAMMER_FRAMES = 100
HAMMER_BLOWS_MAX = 20_000
PRODUCER_WORDS = (RingWord.HEAD, RingWord.SETTLE_TAIL, RingWord.WANTS, RingWord.PRODUCER_STATE)


def template(bench: Bench, shard: int) -> tuple[str, bytes]:
    """Return a topic that is not judged, and a valid frame for it as a client encoded it."""
    topic = topics_of("liar")[shard]
    key = f"template-{shard}"
    if key not in bench.more:
        before = rings_of(bench)
        with ringlog.connect(bench.host.url) as client:
            client.append(topic, b"sound " * 20)
            [name] = [x for x in rings_of(bench) - before if x.startswith(f"ring-{shard:02d}-")]
            scribbler = Scribbler(Path(bench.host.info.shm_dir) / name)
            bench.more[key] = scribbler.first_frame()
            scribbler.close()
    return topic, bench.more[key]


def rings_of(bench: Bench) -> set[str]:
    """Return the file names of the existing rings."""
    return {path.name for path in Path(bench.host.info.shm_dir).glob("ring-*.ring")}


# -- RF-32 --------------------------------------------------------------------------------------------


def lies(bench: Bench, chance: random.Random) -> None:
    """Publish lies on rings (RF-32). The shard closes the ring with a reason, or the lie is harmless.

    All these rings are removed, and no other process is affected.
    """
    before, mark = bench.pids, bench.load.mark()
    rings = rings_of(bench)
    with Opener(bench.host.info) as opener:
        for _ in range(LIES):
            shard = chance.randrange(2)
            _, frame = template(bench, shard)
            raw = opener.open(shard)
            try:
                _lie(raw, frame, chance)
                closed = raw.wait_closed(LIE_S)
                bench.account.count_work("rings_closed_on_liars", int(closed > 0))
            finally:
                raw.close()
            bench.account.count_work("lies", 1, "RF-32")
    _wait_gone(bench, rings)
    bench.load.need_work(mark, 5)
    bench.need_same(before)


def _wait_gone(bench: Bench, but: set[str]) -> None:
    """Wait until all rings except `but` are removed.

    Raises GuaranteeBroken with the words of the remaining ones.
    """
    try:
        bench.wait("rings to go", lambda: rings_of(bench) <= but, 10.0)
    except GuaranteeBroken:
        facts = []
        for name in rings_of(bench) - but:
            scribbler = Scribbler(Path(bench.host.info.shm_dir) / name)
            facts.append((name, {word.name: scribbler.word(word) for word in RingWord}))
            scribbler.close()
        raise GuaranteeBroken(
            f"rings stay after their producer closed them: {facts}\n{bench.log_tail()}"
        ) from None


def _lie(raw: RawRing, frame: bytes, chance: random.Random) -> None:
    kind = chance.randrange(4)
    if kind == 0:
        raw.producer.push_one(twisted(frame, chance, chance.getrandbits(63) | 1))
    elif kind == 1:
        raw.producer.push_one(frame)
        raw.store_word(chance.choice(PRODUCER_WORDS), any_word(chance, raw.producer.head))
    elif kind == 2:
        junk = chance.randbytes(8 * chance.randrange(1, 200))
        raw.memory.write(0, junk)
        raw.store_word(RingWord.HEAD, len(junk) + 8 * chance.randrange(-3, 4))
    else:
        length = chance.choice(
            (0, 1, 72, 75, 76, len(frame) - 4, len(frame), 1 << 20, 0xFFFFFFFE, 0xFFFFFFFF)
        )
        raw.producer.push_one(length.to_bytes(4, "little") + frame[4:])
    raw.ring()


# -- RF-33 --------------------------------------------------------------------------------------------


def race_body(bench: Bench, chance: random.Random) -> None:
    """Change bytes of a frame continuously while the shard copies it (RF-33).

    Every frame in the log must be valid, whatever was refused. The offline verifier reads all of them at the
    end of the bench.
    """
    before = bench.pids
    deadline = time.monotonic() + HAMMER_S
    taken = refused = 0
    with Opener(bench.host.info) as opener:
        while time.monotonic() < deadline:
            shard = chance.randrange(2)
            _, frame = template(bench, shard)
            raw = opener.open(shard)
            try:
                done, broken = _hammer_one(raw, frame, chance)
                taken, refused = taken + done, refused + broken
            finally:
                raw.close()
    require(taken, "not one frame of the hammer was taken: it does not race")
    require(refused, "not one frame of the hammer was refused: it does not race")
    bench.account.count_work("hammered_taken", taken)
    bench.account.count_work("hammered_refused", refused)
    bench.need_same(before)
    bench.need_work(5)


def _hammer_one(raw: RawRing, frame: bytes, chance: random.Random) -> tuple[int, int]:
    """Return (accepted frames, refused frames).

    Ends when the ring is closed, or after HAMMER_FRAMES frames.
    """
    at = chance.randrange(80, len(frame))
    good, bad = frame[at : at + 1], bytes([frame[at] ^ 0x55])
    taken = refused = 0
    for _ in range(HAMMER_FRAMES):
        made = bytearray(frame)
        # A new producer id, so that the shard does not take the frame for a repeat.
        made[40:48] = (chance.getrandbits(63) | 1).to_bytes(8, "little")
        if raw.producer.push_one(made) is None:
            break
        index = (raw.producer.head - len(frame)) % raw.producer.capacity
        raw.ring()
        for _ in range(HAMMER_BLOWS_MAX):
            raw.memory.write(index + at, bad)
            raw.memory.write(index + at, good)
            if raw.memory.load(RingWord.TAIL) == raw.producer.head:
                break
        if raw.memory.load(RingWord.CONSUMER_STATE) == layout.RingConsumerState.CLOSED:
            return taken, refused + 1
        entries = raw.producer.take_settlements()
        wrong = sum(entry_error(entry, "") is not None for entry in entries)
        taken, refused = taken + len(entries) - wrong, refused + wrong
    return taken, refused


# -- RF-25 --------------------------------------------------------------------------------------------


def scribbled(bench: Bench, chance: random.Random) -> None:
    """Overwrite words and bytes of a client's ring (RF-25).

    The client gets another ring and loses nothing.
    """
    _scribble(bench, chance, kills=False)


def scribbled_and_killed(bench: Bench, chance: random.Random) -> None:
    """Overwrite a client's ring and kill the shard (RF-25).

    The successor refuses the ring and its client learns it.
    """
    _scribble(bench, chance, kills=True)


def _scribble(bench: Bench, chance: random.Random, *, kills: bool) -> None:
    shard = chance.randrange(2)
    topic = bench.new_topic(shard, chance)
    before, rings = bench.pids, rings_of(bench)
    mark = bench.load.mark()
    with bench.load_on(topic) as victim:
        victim.need_work(0, 5)
        for turn in range(3 if kills else SCRIBBLES):
            mine = [name for name in rings_of(bench) - rings if name.startswith(f"ring-{shard:02d}")]
            if mine:
                _scribble_once(Path(bench.host.info.shm_dir) / max(mine), chance)
                bench.account.count_work("scribbles", 1, "RF-25")
            if kills:
                bench.host.kill("wal_shard", shard=shard)
                bench.host.wait_ready()
            if kills or turn % 10 == 9:
                victim.need_work(None, 3)
            time.sleep(SCRIBBLE_EVERY_S)
        victim.need_work(None, 5)
        require(victim.judge().acked, "the victim wrote nothing")
    bench.wait("the victim's rings to go", lambda: rings_of(bench) <= rings or kills)
    bench.load.need_work(mark, 5)
    bench.need_same(before, but=f"wal_shard-{shard:02d}" if kills else "")


def _scribble_once(path: Path, chance: random.Random) -> None:
    try:
        scribbler = Scribbler(path)
    except (OSError, ValueError, RingError):
        return  # It was removed in the meantime.
    try:
        kind = chance.randrange(4)
        if kind < 2:
            word = chance.choice(list(RingWord))
            scribbler.put(word, any_word(chance, scribbler.word(word)))
        elif kind == 2:
            start = scribbler.word(RingWord.HEAD) % scribbler.identity.capacity
            room = scribbler.identity.capacity - start
            scribbler.put_bytes(layout.HEADER_BYTES + start, chance.randbytes(min(room, 4_096)))
        else:
            entry = 64 * chance.randrange(scribbler.identity.settle_slots)
            scribbler.put_bytes(scribbler.identity.settle_offset + entry, chance.randbytes(64))
    finally:
        scribbler.close()


# -- RF-31 --------------------------------------------------------------------------------------------


def second_producer(bench: Bench, _: random.Random) -> None:
    """Attach to a ring whose producer is alive (RF-31). The attempt is refused and disturbs no client."""
    before, mark = bench.pids, bench.load.mark()
    names = rings_of(bench)
    require(names, "there is no ring")
    refused = 0
    for name in names:
        try:
            RingProducer.attach(str(Path(bench.host.info.shm_dir) / name)).close()
        except RingError as e:
            require("already has a producer" in str(e), f"refused for another reason: {e}")
            refused += 1
    require(refused == len(names), f"{len(names) - refused} of {len(names)} rings took a second producer")
    done = subprocess.run(
        [sys.executable, "-c", _ATTACH, *(str(Path(bench.host.info.shm_dir) / name) for name in names)],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    if done.returncode:
        raise GuaranteeBroken(f"another process got a ring: {done.stdout} {done.stderr}")
    bench.load.need_work(mark, 5)
    bench.need_same(before)


_ATTACH = """
import sys
from ringlog.errors import RingError
from ringlog.ring.producer import RingProducer
for path in sys.argv[1:]:
    try:
        RingProducer.attach(path)
    except RingError:
        continue
    sys.exit(path)
"""

CASES: tuple[Case[Bench], ...] = (
    Case("lies", (), lies),
    Case("scribbles", (), scribbled),
    Case("scribbles-and-kills", (), scribbled_and_killed),
    Case("hammer", ("RF-33",), race_body),
    Case("second-producer", ("RF-31",), second_producer),
)
