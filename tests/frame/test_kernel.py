"""The compiled kernel gives the same results as NumPy and plain Python on every input, and writes nothing
else."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import codec, encode_records, frame, layout
from ringlog.frame.batch import CheckedFrameRange, FrameBatch, ScanEnd, scan, scan_checked
from ringlog.frame.body import walk_body
from ringlog.frame.header import unpack_header
from ringlog.frame.kernel import LIMITS
from ringlog.frame.layout import Column
from ringlog.frame.settle_entry import S_POSITION, S_PRODUCER_SEQ, S_TOPIC, WORDS
from ringlog.frame.spans import spans_of
from ringlog.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX
from ringlog.native_kernel import kernel
from tests.support import frame_oracle as oracle
from tests.support.frame_samples import any_frame, fix_body_checksum, mutated_frame

ROOT = Path(__file__).parent.parent.parent

payloads = st.lists(st.binary(max_size=30), min_size=1, max_size=12)


@st.composite
def plain_frame(draw: st.DrawFn) -> bytearray:
    """Draw a frame as a producer sends it: only payloads, sometimes with the flag FOLLOWS."""
    made = frame(
        encode_records(draw(payloads)),
        topic_id=draw(st.integers(1, 3)),
        producer_id=draw(st.integers(1, 2)),
        producer_seq=draw(st.integers(1, 6)),
        epoch=draw(st.integers(0, 2)),
    )
    if draw(st.booleans()):
        frames.words_of(made)[layout.W_TAIL] |= frames.FOLLOWS
    return made


@st.composite
def damaged(draw: st.DrawFn) -> bytearray:
    """Draw a plain frame with one changed byte, sometimes with a corrected body checksum."""
    made = draw(plain_frame())
    at = draw(st.integers(0, len(made) - 1))
    made[at] ^= draw(st.integers(1, 255))
    if draw(st.booleans()):
        fix_body_checksum(made)
    return made


tails = st.sampled_from(
    [b"", bytes(16), b"\xff" * 8, b"\x4c\0\0\0" + bytes(20), b"\1" * 8, bytes(8) + b"\1" * 8]
)


@given(
    st.lists(plain_frame() | damaged() | any_frame() | mutated_frame(), max_size=6), tails, st.integers(0, 8)
)
@example([], b"", 5)
def test_scan_checked_finds_frames_like_scan_and_checks_them_like_the_oracle(
    pieces: list[bytearray], tail: bytes, frames_max: int
) -> None:
    """The results agree for any bytes that a producer writes (RF-31)."""
    buffer = bytearray().join([*pieces, tail])
    assume(len(buffer) % 8 == 0)
    before = bytearray(buffer)
    expected = scan(before, frames_max=frames_max)
    found = scan_checked(buffer, 1_000, frames_max=frames_max)
    assert (found.stop, found.end, found.reason) == (expected.stop, expected.end, expected.reason)
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.total_bytes.tolist() == expected.total_bytes.tolist()
    checked, words = found.checked, expected.words
    assert checked is not None
    assert checked.entries.shape == (len(found), WORDS)
    assert (checked.entries[:, S_POSITION] == expected.offsets + 1_000).all()
    assert (checked.entries[:, S_TOPIC] == words[:, layout.W_TOPIC]).all()
    assert (checked.entries[:, S_PRODUCER_SEQ] == words[:, layout.W_PRODUCER_SEQ]).all()
    follows = (words[:, layout.W_TAIL] & frames.FOLLOWS) != 0
    assert (checked.follows is None) == (not follows.any())
    if checked.follows is not None:
        assert checked.follows.tolist() == follows.tolist()
    bare = words.copy()
    bare[:, layout.W_TAIL] &= ~frames.FOLLOWS
    assert (found.words == bare).all()
    frames.write_headers(frames.words_of(before), FrameBatch(expected.offsets, bare, 0, ScanEnd.CLEAN))
    assert buffer == before, "nothing else is changed"
    spans = zip(found.offsets.tolist(), (found.offsets + found.total_bytes).tolist(), strict=True)
    judged = [oracle.judge_sent(bytes(before[start:stop])) for start, stop in spans]
    seen = zip(checked.accounted.tolist(), checked.largest.tolist(), checked.faults.tolist(), strict=True)
    assert list(seen) == judged
    require_runs(checked.runs, found.words, judged)


def require_runs(runs: list[CheckedFrameRange], words: Any, judged: list[tuple[int, int, int]]) -> None:
    """Require that runs cover all rows, are as long as possible, and describe their frames correctly."""
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])][: len(runs)]
    assert (runs[-1].stop if runs else 0) == len(words)
    counts, columns = frames.counts_of(words).tolist(), frames.columns_of(words).tolist()
    alike = [
        (each[layout.W_TOPIC], each[layout.W_PRODUCER_ID], each[layout.W_BASE_SEQ],
         each[layout.W_COUNT_EPOCH] >> 32, each[layout.W_TAIL] >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK)
        for each in words.tolist()
    ]  # fmt: skip
    numbers = words[:, layout.W_PRODUCER_SEQ].tolist()
    starts = {run.start for run in runs}
    for row in range(1, len(words)):
        goes_on = alike[row] == alike[row - 1] and numbers[row] == numbers[row - 1] + 1
        goes_on &= not judged[row][2] and not judged[row - 1][2]
        assert (row not in starts) == goes_on
    for run in runs:
        rows = range(run.start, run.stop)
        assert run.fault == judged[run.start][2]
        assert run.records == sum(counts[row] for row in rows)
        assert run.bytes == sum(judged[row][0] for row in rows)
        assert run.record_bytes_max == max(judged[row][1] for row in rows)
        assert run.records_max == max(counts[row] for row in rows)
        assert run.equal_counts == (len({counts[row] for row in rows}) == 1)
        assert run.columns == functools.reduce(operator.or_, [columns[row] for row in rows])


@given(st.lists(any_frame(), min_size=1, max_size=5), st.integers(0, (1 << 64) - 1))
def test_hashes_and_seals_equal_those_of_xxhash(pieces: list[bytearray], salt: int) -> None:
    buffer = bytes(bytearray().join(pieces))
    batch = scan(buffer)
    assert frames.body_hashes(buffer, batch).tolist() == [xxh3_64_intdigest(bytes(p[80:])) for p in pieces]
    assert frames.seals(batch.words, salt).tolist() == [
        xxh3_64_intdigest(bytes(p[:72]), salt) for p in pieces
    ]


@pytest.mark.slow
@given(mutated_frame() | any_frame())
def test_walk_body_agrees_with_the_oracle(whole: bytearray) -> None:
    """Both return the same positions, or the same fault at the same position."""
    header = unpack_header(whole, 0)
    assume(not oracle.header_fault(header) and header.records and not header.codec)
    body = memoryview(bytes(whole))[layout.HEADER_BYTES : header.total_bytes]
    try:
        expected: Any = oracle.walk_body(body, header.columns, header.records)
    except FrameInvalid as e:
        expected = (e.reason, e.offset)
    try:
        found: Any = walk_body(body, header.columns, header.records)
    except FrameInvalid as e:
        found = (e.reason, e.offset)
    assert found == expected


ROWS_OF_NOTHING = (None,) * 9


@pytest.mark.parametrize(
    "items",
    [[], [b"x", bytearray(b"y")], [b"x", "y"], [memoryview(b"x")],
     [b"x" * (RECORD_BYTES_MAX + 1)], (b"x", [0, 1])],
    ids=["none", "bytearray", "text", "view", "too large", "no offsets"],
)  # fmt: skip
def test_the_kernel_does_not_encode_values_other_than_plain_bytes(items: Any) -> None:
    columns = (items, *ROWS_OF_NOTHING)
    assert kernel.encode(columns, len(items), 1, bytes(80), FRAME_BYTES_MAX, LIMITS) is None


@pytest.mark.parametrize("records", [0, -1, 1 << 40])
def test_the_kernel_does_not_encode_invalid_numbers_of_records(records: int) -> None:
    columns = ([b"x"], *ROWS_OF_NOTHING)
    assert kernel.encode(columns, 1, records, bytes(80), FRAME_BYTES_MAX, LIMITS) is None


def test_a_header_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="header"):
        kernel.encode(([b"x"], *ROWS_OF_NOTHING), 1, 1, bytes(79), FRAME_BYTES_MAX, LIMITS)


def test_the_kernel_does_not_encode_more_bytes_than_the_limit() -> None:
    one = codec.encode_frames([b"x"] * 4, 2, topic_id=1)[0]
    columns = ([b"x"] * 4, *ROWS_OF_NOTHING)
    assert kernel.encode(columns, 4, 2, bytes(80), len(one), LIMITS) is not None
    assert kernel.encode(columns, 4, 2, bytes(80), len(one) - 1, LIMITS) is None


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.zeros((count, layout.HEADER_WORDS), dtype=np.uint64)


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 4), (4, 5)])
def test_rows_outside_of_a_matrix_are_an_error(start: int, stop: int) -> None:
    """An error of the caller must not read or write foreign memory."""
    entries = np.zeros((3, WORDS), dtype=np.uint64)
    with pytest.raises(ValueError, match="outside"):
        kernel.number(rows(3), entries, start, stop, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="outside"):
        kernel.number(rows(9), entries, 0, 4, 1, 1, 1, 1)
    offsets = np.arange(3, dtype=np.int64) * 80
    with pytest.raises(ValueError, match="outside"):
        kernel.seal(bytearray(240), offsets, rows(3), start, stop, 1)


@pytest.mark.parametrize("offset", [-8, 161, 1 << 62])
def test_offsets_outside_of_a_buffer_are_an_error(offset: int) -> None:
    offsets = np.array([0, offset, 240], dtype=np.int64)
    buffer = bytearray(240)
    with pytest.raises(ValueError, match="outside"):
        kernel.seal(buffer, offsets, rows(3), 1, 2, 1)
    assert buffer == bytes(240)
    with pytest.raises(ValueError, match="outside"):
        kernel.stamp(buffer, offsets, 1, 1, 1, 1, True)


def test_the_kernel_refuses_read_only_buffers() -> None:
    with pytest.raises((TypeError, BufferError)):
        kernel.take(bytes(80), 1, 0, LIMITS)
    with pytest.raises((TypeError, BufferError)):
        kernel.seal(bytes(80), np.zeros(1, np.int64), rows(1), 0, 1, 1)


@given(st.lists(plain_frame(), min_size=1, max_size=5), st.integers(0, (1 << 64) - 1))
def test_seal_rows_gives_the_seals_of_the_batch_functions(pieces: Sequence[bytearray], salt: int) -> None:
    buffer = bytearray().join(pieces)
    batch = scan_checked(buffer)
    other, expected = bytearray(buffer), scan(bytearray(buffer))
    last = frames.seal_rows(buffer, batch, 0, len(batch), salt)
    expected.words[:, layout.W_SEAL_XXH3] = frames.seals(expected.words, salt)
    frames.write_headers(frames.words_of(other), expected)
    assert last == int(expected.words[-1, layout.W_SEAL_XXH3])
    assert buffer == other
    assert (batch.words == expected.words).all()


SANITIZED = """
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("_kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
chance = random.Random(7)
LIMITS = bytes.fromhex(sys.argv[2])
for turn in range(4_000):
    count = chance.randint(1, 30)
    kind = chance.choice((chance.randbytes, bytes))
    payloads = [chance.choice((kind(chance.randint(0, 40)), None)) for _ in range(count)]
    head = bytearray(80)
    head[4:8] = bytes((1, 2, 1, 0))
    head[40:48] = head[48:56] = (5).to_bytes(8, "little")
    def some(values):
        return [chance.choice((None, *values)) for _ in range(count)]
    columns = chance.choice(((None,) * 9, (
        some((b"k", b"")), some(("t", "\u00e9" * 3)), some(("n",)),
        some(({"a": b"b"}, [("c", b""), ("d", b"e")], {})),
        some((b"{}",)), some((5, -5)), some((6,)), some((7,)), some((8, 255)),
    )))
    columns = (payloads, *columns)
    buffer, offsets = kernel.encode(columns, count, chance.randint(1, 9), bytes(head), 1 << 26, LIMITS)
    kernel.stamp(buffer, offsets, 1, 2, 3, 4, True)
    frames = len(offsets) // 8 - 1
    whole = kernel.take(buffer, 1 << 40, 0, LIMITS)
    assert whole[2] == frames and all(not run[2] for run in whole[6]), whole
    last = int.from_bytes(offsets[-16:-8], "little")
    for held in (2, 300, 1 << 16, (1 << 31) - 1, (1 << 32) - 1):
        lying = bytearray(buffer)
        lying[last + 32 : last + 36] = held.to_bytes(4, "little")
        lying[last + 80 :] = bytes(len(lying) - last - 80)
        kernel.take(lying, 1 << 40, 0, LIMITS)
    table, entries = whole[0], whole[1]
    words, places = memoryview(table)[: frames * 80], memoryview(table)[frames * 80 : frames * 88]
    kernel.number(words, entries, 0, frames, 1, 2, 3, 3)
    kernel.seal(buffer, places, words, 0, frames, 9)
    kernel.measure(buffer, places, words, LIMITS)
    for row in range(frames):
        assert len(kernel.spans(buffer, places[8 * row :][:8], words[80 * row :][:80])) == 3
    # Every length and count that a producer may invent, in a buffer that ends with its allocation.
    for _ in range(6):
        hostile = bytearray(buffer[: chance.randrange(0, len(buffer) + 1)])
        for _ in range(chance.randint(1, 4)):
            if hostile:
                places = (0, 1, 4, 6, 7, 32, 33, 35, 56, 58, 60, 80, 84, 88, chance.randrange(len(hostile)))
                at = chance.choice(places)
                value = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
                if at < len(hostile):
                    hostile[at] = value
        kernel.take(hostile, chance.choice((0, 1, 1 << 40)), 0, LIMITS)
        kernel.scan(hostile, 0, len(hostile), 1 << 40, 1 << 26)
        body = bytes(hostile[80:])
        for count_said in (1, 2, 30, (1 << 32) - 1):
            columns = chance.randrange(1 << 11)
            columns |= (columns & chance.randrange(16)) << 11
            kernel.walk(body, columns, count_said)
            kernel.judge(body, columns | 1, count_said, LIMITS)
print("clean")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_kernel_accesses_no_byte_outside_of_a_buffer(tmp_path: Path) -> None:
    """The same source runs under the address and the undefined-behaviour sanitizer with hostile frames
    (RF-31)."""
    compiler = os.environ.get("CC", "cc")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    )
    library = found.stdout.strip()
    if found.returncode or not os.path.isabs(library):
        pytest.skip("the compiler has no address sanitizer here")
    target = tmp_path / "_kernel.so"
    include = sysconfig.get_paths()["include"]
    flags = ["-O1", "-g", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(
        [compiler, *flags, f"-I{include}", str(ROOT / "native" / "kernel.c"), "-o", str(target)],
        check=True, timeout=120,
    )  # fmt: skip
    environment = os.environ | {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(target), LIMITS.hex()], capture_output=True, text=True,
        timeout=150, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr[-3_000:]


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "ringlog._kernel":
            raise ModuleNotFoundError("no such file", name=name)
sys.meta_path.insert(0, Blocked())
import ringlog, ringlog.errors
"""


def without_kernel(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_connect_without_the_kernel_fails_with_a_remedy() -> None:
    done = without_kernel(
        "try:\n    ringlog.connect()\nexcept ringlog.errors.KernelMissing as e:\n    print(e.code, e)"
    )
    assert done.stdout.startswith("kernel_missing ringlog's compiled kernel is missing: reinstall"), (
        done.stderr
    )
    assert "no such file" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ringlog.cli.main(['doctor'])", "supervisor.main()"])
def test_a_command_without_the_kernel_fails_with_one_line(command: str) -> None:
    done = without_kernel(f"import ringlog.cli, supervisor\nsys.argv = ['x']\nsys.exit({command})")
    assert done.returncode == 1
    assert done.stderr.startswith("ringlog's compiled kernel is missing")
    assert done.stderr.count("\n") == 1


def test_frames_with_and_without_nulls_are_decoded_together() -> None:
    """The validity covers all records, also if the column has nulls in one frame and no nulls in the next."""
    keys: list[list[bytes | None]] = [[b"a", None], [b"b", b""], [None, b""]]
    made = [codec.encode_frames([b"x", b"yy"], 2, {"keys": each}, topic_id=7)[0] for each in keys]
    whole = b"".join(made)
    batch = scan(whole)
    assert len({*frames.shapes_of(batch.words).tolist()}) == 2
    assert len({*frames.shapes_but_nulls_of(batch.words).tolist()}) == 1
    found = spans_of(whole, batch)
    assert found.valid[Column.KEY].tolist() == [True, False, True, True, False, True]
    starts, stops = found.spans[Column.KEY]
    assert [whole[a:b] for a, b in zip(starts, stops, strict=True)] == [b"a", b"", b"b", b"", b"", b""]
