"""Names that want to be paths, patterns that want to take for ever, bodies that want to grow."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import lz4.block
import xxhash
import zstandard

from chaos.attack.arena import Arena, a_frame, ask, must
from ringlog.cli.passes import COMPACTOR, ask_actor
from ringlog.client.fields import NewRecord
from ringlog.envelope import messages as m
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.envelope.wire import encode
from ringlog.types import Codec

BAD_NAMES = (
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "a\x1b[2J", "a b", "-a", ".a", "_a",
    "a" * 256, "a" * 100_000, "ｍine", "mіne", "mine\u202e", "é", "a\u0301", "mine*", "%2e%2e", "$(id)",
    "`id`", "a;b", "a'b", 'a"b', "\ufeffa", "CON ", "a%s%n",
)  # fmt: skip
GOOD_NAMES = ("mine.Zq", "mine.zQ", "mine.CON", "mine.nul", "mine...", "mine.:-_", "mine." + "z" * 250)
"""Legal, and confusing elsewhere: case pairs, device names, the longest."""
TAGS = 100_000
TAGS_NIGHT = 1_000_000
TAGS_PER_APPEND = 5_000
ANSWER_S_MAX = 4.0
"""For one delete by pattern over all tags; a pattern that backtracks would take years."""
BOMB_BYTES = 60 << 20
"""Below the frame limit, and a thousand times what carries it."""
HUGE_BYTES = 512 << 20
"""What a body becomes that says it becomes little: seen in the memory of whoever believes its own header."""
PEAK_GROWTH_MAX = 300 << 20


def names(arena: Arena, dice: random.Random) -> int:
    """RF-107: refused by the rule; and no path ever holds a name."""
    del dice
    with arena.peer(key=arena.owner) as peer:
        for name in BAD_NAMES:
            for message, attached in (
                (m.TopicPut(name), []), (m.Append(name, 1, create=True), [a_frame(b"x")]),
                (m.TopicResolve(name), []), (m.Read(name, 0), []), (m.TopicDelete(name), []),
            ):  # fmt: skip
                answer = ask(peer, [encode(message, 1), *attached])
                is_absent = isinstance(answer, m.TopicDeleted) and not answer.deleted
                must(isinstance(answer, m.ErrorReply) or is_absent, f"{name[:40]!r}: {answer!r}")
                is_short = not isinstance(answer, m.ErrorReply) or len(str(answer)) < 2_000
                must(is_short, f"an error repeats a name of {len(name)} characters")
    with arena.connect() as client:
        for name in GOOD_NAMES:
            client.append(name, name.encode())
        for name in GOOD_NAMES:
            found = [record.data for record in client.read(name)]
            must(found == [name.encode()], f"{name} holds {found!r}")
    ask_actor(arena.running.info.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade)
    for root in (arena.running.data_dir, arena.running.info.shm_dir):
        for path in Path(root).rglob("*"):
            held = [name for name in (*GOOD_NAMES, "canary.log", "mine.log") if name in path.name]
            must(not held, f"a path holds a name: {path.name}")
    return len(BAD_NAMES) * 5 + len(GOOD_NAMES)


def patterns(arena: Arena, dice: random.Random, *, tags: int = TAGS) -> int:
    """RF-108: time grows with the tags, whatever the pattern."""
    topic = "mine.tags"
    with arena.connect() as client:
        client.topics.create(topic, exist_ok=True)
        for start in range(0, tags, TAGS_PER_APPEND):
            client.append_many(
                topic,
                [NewRecord(data=b"", tag=f"{'a' * 40}{n}") for n in range(start, start + TAGS_PER_APPEND)],
            )
    slow = "a" * 30 + "*"
    cases: list[Any] = [
        "*a" * 100 + "b", "a*" * 100 + "b", "(a+)+$", "a" * 257 + "*", ["tag", "Glob", "*" * 200],
        ["tag", "Glob", "[a-z]*"], ["tag", "Regex", "(a|aa)+$"], ["tag", "Eq", "a" * 10_000],
        ["tag"] * 1_000, {"tag": slow}, ["or", *[["tag", "Eq", "x"]] * 1_000], f"{'a' * 40}no*",
        [[]] * 5_000, dice.randbytes(50),
    ]  # fmt: skip
    with arena.peer(key=arena.owner) as peer:
        for match in cases:
            begun = time.monotonic()
            answer = ask(peer, [encode(m.RecordsDelete(topic, match=match), 1)], ANSWER_S_MAX)
            took = time.monotonic() - begun
            must(answer is not None, f"a delete by {str(match)[:60]} took more than {took:.1f} s")
            is_nothing = isinstance(answer, m.RecordsDeleted) and answer.deleted == 0
            must(isinstance(answer, m.ErrorReply) or is_nothing, f"{str(match)[:60]}: {answer!r}")
        begun = time.monotonic()
        answer = ask(peer, [encode(m.RecordsDelete(topic, match=slow), 1)], ANSWER_S_MAX * 5)
    must(
        isinstance(answer, m.RecordsDeleted) and answer.deleted == tags,
        f"{tags:,} tags matched: {answer!r} after {time.monotonic() - begun:.1f} s",
    )
    return len(cases) + 1


# -- decompression ----------------------------------------------------------------------------------------


def compressed_frame(topic: m.TopicInfo, codec: Codec, packed: bytes, raw_len: int, number: int) -> bytes:
    """A frame whose body is `packed` and says that it becomes `raw_len` bytes."""
    plain = bytearray(
        a_frame(b"x", topic_id=topic.topic_id, epoch=topic.epoch, producer_id=55, producer_seq=number)
    )
    body = (struct.pack("<Q", len(packed)) + packed).ljust(8 + (len(packed) + 7 & ~7), b"\0")
    plain[0:4] = (80 + len(body) - 4).to_bytes(4, "little")
    plain[56:60] = raw_len.to_bytes(4, "little")
    plain[60] = int(codec)
    plain[64:72] = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    return bytes(plain[:80]) + body


def bombs() -> list[tuple[str, Codec, bytes, int]]:
    """Bodies that grow a thousandfold, lie about it, come twice, or need a window of gigabytes."""
    small = zstandard.ZstdCompressor(level=3).compress(bytes(BOMB_BYTES))
    huge = zstandard.ZstdCompressor(level=3).compress(bytes(HUGE_BYTES))
    plain = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(BOMB_BYTES))
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(1 << 20))
    # A frame header that states 2 GiB, with nothing of the kind behind it.
    lying = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", (1 << 31) - 8) + b"\x01\x00\x00"
    packed = lz4.block.compress(bytes(BOMB_BYTES), store_size=False)
    return [
        ("is huge, says little", Codec.ZSTD, huge, 4_096),
        ("is huge, says a lot", Codec.ZSTD, huge, 50 << 20),
        ("grows", Codec.ZSTD, small, BOMB_BYTES), ("grows, says little", Codec.ZSTD, small, 4_096),
        ("says nothing", Codec.ZSTD, plain, BOMB_BYTES), ("lies in its header", Codec.ZSTD, lying, 1 << 20),
        ("comes twice", Codec.ZSTD, small + small, BOMB_BYTES), ("wide window", Codec.ZSTD, wide, 1 << 20),
        ("lz4 grows", Codec.LZ4, packed, BOMB_BYTES), ("lz4 says little", Codec.LZ4, packed, 4_096),
        ("says too much", Codec.LZ4, b"\0" * 64, 0xFFFFFFF8), ("empty", Codec.ZSTD, b"", 1 << 20),
        ("no zstd at all", Codec.ZSTD, b"\xff" * 64, 4_096),
    ]  # fmt: skip


def decompression(arena: Arena, dice: random.Random) -> int:
    """RF-103: nobody allocates what a body says, neither when it comes nor when it is sealed and read."""
    topic = "mine.bombs"
    before = {name: _peak(pid) for name, pid in arena.census().pids.items()}
    with arena.connect() as client:
        client.topics.create(topic, exist_ok=True)
    with arena.peer(key=arena.limited) as peer:
        info = ask(peer, [encode(m.TopicResolve(topic), 1)])
        assert isinstance(info, m.TopicInfo)
        made = bombs()
        for number, (what, codec, packed, raw_len) in enumerate(dice.sample(made, len(made)), 1):
            frame = compressed_frame(info, codec, packed, raw_len, number)
            answer = ask(peer, [encode(m.Append(topic, 1), number), frame], 10.0)
            must(answer is not None, f"a body that {what} got no answer\n{arena.log_tail()}")
    ask_actor(arena.running.info.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade)
    for name, pid in arena.census().pids.items():
        grown = _peak(pid) - before.get(name, 0)
        must(grown < PEAK_GROWTH_MAX, f"{name} allocated {grown >> 20} MiB for bodies of a few KiB")
    _reads_or_says_why(arena, topic)
    return len(made)


def _reads_or_says_why(arena: Arena, topic: str) -> None:
    """What was stored is read, or refused with its place: never silence, never a dead process."""
    with arena.peer(key=arena.limited) as peer:
        answer = ask(peer, [encode(m.Read(topic, 0), 1)], 10.0)
        must(isinstance(answer, m.ReadReply | m.ErrorReply), f"reading bombs: {answer!r}")


def _peak(pid: int) -> int:
    """Most bytes a process ever held."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0
