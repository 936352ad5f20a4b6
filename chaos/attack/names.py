"""Attacks with topic names that resemble paths, with slow patterns, and with decompression bombs."""

from __future__ import annotations

import random
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lz4.block
import xxhash
import zmq
import zstandard

from chaos.attack.arena import (
    ANSWER_S,
    RSS_GROWTH_BYTES_MAX,
    SLOWER_MAX,
    Arena,
    a_frame,
    a_producer,
    ask,
    head_of,
)
from ringlog.cli.maintenance import COMPACTOR, request_actor
from ringlog.client import Client
from ringlog.client.write.fields import NewRecord
from ringlog.drill.checks import GuaranteeBroken, require
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
"""Valid names that are problematic elsewhere: case pairs, device names, the longest name."""
TAGS = 100_000
TAGS_PER_APPEND = 5_000
FIRST_PART = 10
"""Deletes are measured at 1/FIRST_PART of the tags and at all tags. The time for each tag must not grow."""
TAG_BYTES = 128
"""Allowed memory (bytes) for each tag of a round: indexes of segments in force, and a checkpoint. Tags of
earlier rounds must not stay in memory."""
CPU_SLACK_S = 0.25
"""Tolerance (s) of a shard's CPU time.

The clock has a resolution of 0.01 s, and the shard does other work.
"""
BOMB_BYTES = 60 << 20
"""Decompressed size of a bomb: below the frame limit, and about 1,000 times its compressed size."""
HUGE_BYTES = 512 << 20
"""Decompressed size of a body whose header states a small size.

If a process decompresses it without a limit, its peak memory shows this.
"""
PEAK_GROWTH_MAX = 300 << 20


def names(arena: Arena, dice: random.Random) -> int:
    """Invalid names must be refused, and valid names must not appear in any path (RF-107)."""
    del dice
    with arena.peer(key=arena.owner) as peer:
        for name in BAD_NAMES:
            for message, attached in (
                (m.TopicPut(name), []), (m.Append(name, 1, create=True), [a_frame(b"x")]),
                (m.TopicResolve(name), []), (m.Read(name, 0), []), (m.TopicDelete(name), []),
            ):  # fmt: skip
                answer = ask(peer, [encode(message, 1), *attached])
                is_absent = isinstance(answer, m.TopicDeleted) and not answer.deleted
                require(isinstance(answer, m.ErrorReply) or is_absent, f"{name[:40]!r}: {answer!r}")
                is_short = not isinstance(answer, m.ErrorReply) or len(str(answer)) < 2_000
                require(is_short, f"an error repeats a name of {len(name)} characters")
    with arena.connect() as client:
        heads = {name: head_of(client, name) for name in GOOD_NAMES}
        for name in GOOD_NAMES:
            client.append(name, name.encode())
        for name, head in heads.items():
            found = [record.data for record in client.read(name, head)]
            require(found == [name.encode()], f"topic {name} contains {found!r}, expected its name only")
    request_actor(arena.running.info.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade)
    for root in (arena.running.data_dir, arena.running.info.shm_dir):
        for path in Path(root).rglob("*"):
            held = [name for name in (*GOOD_NAMES, "canary.log", "mine.log") if name in path.name]
            require(not held, f"a path contains a topic name: {path.name}")
    return len(BAD_NAMES) * 5 + len(GOOD_NAMES)


def patterns(arena: Arena, dice: random.Random, *, tags: int = TAGS) -> int:
    """Delete by expensive patterns; the CPU time must stay linear in the number of tags (RF-108).

    The CPU time is that of the shards only, so other load on the host does not count. It is compared with
    deletes by harmless patterns, the first of which reads all tags of the topic.
    """
    topic, life = "mine.tags", f"{dice.getrandbits(32):08x}"
    prefix = "a" * 32 + life
    first = tags // FIRST_PART
    arena.growth_max = RSS_GROWTH_BYTES_MAX + tags * TAG_BYTES
    with arena.connect() as client, arena.peer(key=arena.owner) as peer:
        client.topics.create(topic, exist_ok=True)
        begun = time.monotonic()
        _write_tags(client, topic, prefix, range(first))
        asked = _Deletes(arena, peer, topic, ANSWER_S + SLOWER_MAX * (time.monotonic() - begun))
        few_s = asked.harmless()
        begun = time.monotonic()
        _write_tags(client, topic, prefix, range(first, tags))
        # An answer may take as long as the writing of the tags took, times SLOWER_MAX, plus a constant.
        asked.patience += SLOWER_MAX * (time.monotonic() - begun)
        plain_s = asked.harmless()
        most_s = SLOWER_MAX * few_s * FIRST_PART + CPU_SLACK_S
        require(plain_s < most_s, f"{first:,} tags took {few_s:.2f} s, and {tags:,} took {plain_s:.2f} s")
        cases: list[Any] = [
            "*a" * 100 + "b", "a*" * 100 + "b", "(a+)+$", "a" * 257 + "*", ["tag", "Glob", "*" * 200],
            ["tag", "Glob", "[a-z]*"], ["tag", "Regex", "(a|aa)+$"], ["tag", "Eq", "a" * 10_000],
            ["tag"] * 1_000, {"tag": prefix + "*"}, ["or", *[["tag", "Eq", "x"]] * 1_000], f"{prefix}no*",
            [[]] * 5_000, dice.randbytes(50),
        ]  # fmt: skip
        most_s = SLOWER_MAX * plain_s + CPU_SLACK_S
        for match in cases:
            answer, took_s = asked.ask(match)
            is_nothing = isinstance(answer, m.RecordsDeleted) and answer.deleted == 0
            require(isinstance(answer, m.ErrorReply) or is_nothing, f"{str(match)[:60]}: {answer!r}")
            require(took_s < most_s, f"{str(match)[:60]} took {took_s:.2f} s, a plain delete {plain_s:.2f} s")
        deleted, took_s = asked.deleted(prefix + "*")
        require(deleted == tags, f"{tags:,} tags matched, and {deleted:,} were deleted")
        require(took_s < most_s, f"{tags:,} deletes took {took_s:.2f} s, a plain one {plain_s:.2f} s")
        # The next request for the topic drops the deleted records and their tags.
        client.append(topic, b"", tag="last")
        require(asked.deleted("last")[0] == 1, "a record appended after the deletes is not found")
    return len(cases) + 2


def _write_tags(client: Client, topic: str, prefix: str, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, TAGS_PER_APPEND):
        stop = min(start + TAGS_PER_APPEND, numbers.stop)
        client.append_many(topic, [NewRecord(data=b"", tag=f"{prefix}{n}") for n in range(start, stop)])


@dataclass(slots=True)
class _Deletes:
    """Deletes in one topic, with the CPU time that each cost the shards."""

    arena: Arena
    peer: zmq.Socket[Any]
    topic: str
    patience: float

    def ask(self, match: Any) -> tuple[m.Message, float]:
        """Return the answer and the CPU time (s). Raises GuaranteeBroken if no answer arrives in time."""
        before = self.arena.cpu_s("wal_shard")
        answer = ask(self.peer, [encode(m.RecordsDelete(self.topic, match=match), 1)], self.patience)
        if answer is None:
            raise GuaranteeBroken(f"a delete by {str(match)[:60]} took more than {self.patience:.1f} s")
        return answer, self.arena.cpu_s("wal_shard") - before

    def deleted(self, match: Any) -> tuple[int, float]:
        """Return the number of deleted records and the CPU time (s)."""
        answer, took_s = self.ask(match)
        if not isinstance(answer, m.RecordsDeleted):
            raise GuaranteeBroken(f"a delete by {str(match)[:60]}: {answer!r}")
        return answer.deleted, took_s

    def harmless(self) -> float:
        """Return the CPU time (s) of two deletes that scan all tags and match none."""
        return sum(self.deleted(match)[1] for match in ("none", "none*"))


# -- decompression ----------------------------------------------------------------------------------------


def compressed_frame(
    topic: m.TopicInfo, codec: Codec, packed: bytes, raw_len: int, *, producer_id: int, number: int
) -> bytes:
    """Return a frame whose body is `packed` and whose header states `raw_len` decompressed bytes."""
    plain = bytearray(
        a_frame(
            b"x", topic_id=topic.topic_id, epoch=topic.epoch, producer_id=producer_id, producer_seq=number
        )
    )
    body = (struct.pack("<Q", len(packed)) + packed).ljust(8 + (len(packed) + 7 & ~7), b"\0")
    plain[0:4] = (80 + len(body) - 4).to_bytes(4, "little")
    plain[56:60] = raw_len.to_bytes(4, "little")
    plain[60] = int(codec)
    plain[64:72] = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    return bytes(plain[:80]) + body


def bombs() -> list[tuple[str, Codec, bytes, int]]:
    """Return bodies that grow a thousandfold, state a wrong size, are doubled, or need a large window.

    Each is (description, codec, body, stated size).
    """
    small = zstandard.ZstdCompressor(level=3).compress(bytes(BOMB_BYTES))
    huge = zstandard.ZstdCompressor(level=3).compress(bytes(HUGE_BYTES))
    plain = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(BOMB_BYTES))
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(1 << 20))
    # A frame header that states 2 GiB, followed by only a few bytes.
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
    """Send decompression bombs; no process may allocate the stated or actual size (RF-103).

    This includes the checkpoint that reads the stored bodies, and reads by clients.
    """
    topic = "mine.bombs"
    before = {name: _peak(pid) for name, pid in arena.census().pids.items()}
    producer_id = a_producer(dice)
    with arena.connect() as client:
        client.topics.create(topic, exist_ok=True)
    with arena.peer(key=arena.limited) as peer:
        info = ask(peer, [encode(m.TopicResolve(topic), 1)])
        assert isinstance(info, m.TopicInfo)
        made = bombs()
        for number, (what, codec, packed, raw_len) in enumerate(dice.sample(made, len(made)), 1):
            frame = compressed_frame(info, codec, packed, raw_len, producer_id=producer_id, number=number)
            answer = ask(peer, [encode(m.Append(topic, 1), number), frame], 10.0)
            require(answer is not None, f"the bomb {what!r} got no answer within 10 s\n{arena.log_tail()}")
    request_actor(arena.running.info.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade)
    for name, pid in arena.census().pids.items():
        grown = _peak(pid) - before.get(name, 0)
        require(grown < PEAK_GROWTH_MAX, f"{name} allocated {grown >> 20} MiB for bodies of a few KiB")
    _reads_or_says_why(arena, topic)
    return len(made)


def _reads_or_says_why(arena: Arena, topic: str) -> None:
    """Read the topic. The engine must answer with a page or with an error."""
    with arena.peer(key=arena.limited) as peer:
        answer = ask(peer, [encode(m.Read(topic, 0), 1)], 10.0)
        require(isinstance(answer, m.ReadReply | m.ErrorReply), f"reading bombs: {answer!r}")


def _peak(pid: int) -> int:
    """Return the peak resident memory (bytes) of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0
