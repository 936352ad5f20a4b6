"""The compiled kernel does what NumPy and plain Python do, on every input, and touches nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frame_samples import any_frame, fix_body_checksum, mutated_frame
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ringlog.compiled import kernel
from ringlog.frame import batch as frames
from ringlog.frame import codec, encode_records, frame, layout, measure
from ringlog.frame.batch import End, FrameBatch, scan
from ringlog.frame.kernel import find, seal_rows
from ringlog.frame.settle import S_POSITION, S_PRODUCER_SEQ, S_TOPIC, WORDS
from ringlog.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX, SEQ_MAX

ROOT = Path(__file__).parent.parent.parent

payloads = st.lists(st.binary(max_size=30), min_size=1, max_size=12)


@st.composite
def plain_frame(draw: st.DrawFn) -> bytearray:
    """A frame as a producer sends it: payloads alone, perhaps following the one before."""
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
    """A plain frame with one byte changed anywhere, sometimes with a checksum that is right again."""
    made = draw(plain_frame())
    at = draw(st.integers(0, len(made) - 1))
    made[at] ^= draw(st.integers(1, 255))
    if draw(st.booleans()):
        fix_body_checksum(made)
    return made


tails = st.sampled_from(
    [b"", bytes(16), b"\xff" * 8, b"\x4c\0\0\0" + bytes(20), b"\1" * 8, bytes(8) + b"\1" * 8]
)


def judged(buffer: bytearray, batch: FrameBatch) -> tuple[list[bool], Any]:
    """Which frames are sound ones of payloads alone, as admission means it; their measures."""
    words = batch.words.copy()
    words[:, layout.W_TAIL] &= ~frames.FOLLOWS
    bare = FrameBatch(batch.offsets, words, batch.stop, batch.end)
    measures = measure(buffer, bare)
    sound = (
        ~frames.malformed(words)
        & (frames.columns_of(words) == 1)
        & (frames.codecs_of(words) == 0)
        & (frames.types_of(words) == layout.FrameType.APPEND)
        & (words[:, layout.W_PRODUCER_ID] != 0)
        & (words[:, layout.W_PRODUCER_SEQ] != 0)
        & (frames.body_hashes(buffer, bare) == words[:, layout.W_BODY_XXH3])
        & (measures.bad == 0)
    )
    return sound.tolist(), measures


@given(
    st.lists(plain_frame() | damaged() | any_frame() | mutated_frame(), max_size=6), tails, st.integers(0, 8)
)
@example([], b"", 5)
def test_what_is_found_is_what_scan_finds_and_admission_judges(
    pieces: list[bytearray], tail: bytes, frames_max: int
) -> None:
    """RF-31: whatever a producer wrote, both ways see the same frames, and the same ones are sound."""
    buffer = bytearray().join([*pieces, tail])
    assume(len(buffer) % 8 == 0)
    before = bytes(buffer)
    expected = scan(bytearray(buffer), frames_max=frames_max)
    found = find(buffer, 1_000, frames_max=frames_max)
    assert (found.stop, found.end) == (expected.stop, expected.end)
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.total_bytes.tolist() == expected.total_bytes.tolist()
    if found.entries is not None:
        assert found.entries.shape == (len(found), WORDS)
        assert (found.entries[:, S_POSITION] == expected.offsets + 1_000).all()
        assert (found.entries[:, S_TOPIC] == expected.words[:, layout.W_TOPIC]).all()
        assert (found.entries[:, S_PRODUCER_SEQ] == expected.words[:, layout.W_PRODUCER_SEQ]).all()
    if not len(expected) or found.end is End.INVALID:
        assert found.checked is None
        return
    sound, measures = judged(bytearray(before), expected)
    assert (found.checked is not None) == all(sound)
    if found.checked is None:
        assert buffer == before, "nothing is changed in what is not sound"
        assert (found.words == expected.words).all()
        return
    checked, words = found.checked, expected.words
    follows = (words[:, layout.W_TAIL] & frames.FOLLOWS) != 0
    assert checked.accounted.tolist() == measures.accounted.tolist()
    assert checked.largest.tolist() == measures.largest.tolist()
    assert checked.bytes == measures.accounted.sum()
    assert checked.record_bytes_max == measures.largest.max()
    assert checked.records_max == frames.counts_of(words).max()
    assert (checked.follows is None) == (not follows.any())
    if checked.follows is not None:
        assert checked.follows.tolist() == follows.tolist()
    bare = words.copy()
    bare[:, layout.W_TAIL] &= ~frames.FOLLOWS
    assert (found.words == bare).all()
    assert (frames.headers_at(frames.words_of(buffer), found.offsets) == bare).all()
    alike = (layout.W_TOPIC, layout.W_PRODUCER_ID)
    is_run = all((words[1:, column] == words[:-1, column]).all() for column in alike)
    is_run &= bool((frames.epochs_of(words)[1:] == frames.epochs_of(words)[:-1]).all())
    is_run &= bool(
        (bare[1:, layout.W_TAIL] >> np.uint64(32) == bare[:-1, layout.W_TAIL] >> np.uint64(32)).all()
    )
    is_run &= bool((np.diff(words[:, layout.W_PRODUCER_SEQ].astype(np.int64)) == 1).all())
    assert checked.is_run == is_run
    assert checked.is_even == (len(set(frames.counts_of(words).tolist())) == 1)


@pytest.mark.parametrize(
    "items",
    [[], [b"x", bytearray(b"y")], [b"x", "y"], [b"x", None], (memoryview(b"x"),), "abc", iter([b"x"]), 5,
     [b"x" * (RECORD_BYTES_MAX + 1)]],
    ids=["none", "bytearray", "text", "nothing", "view", "a text", "iterator", "number", "too large"],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_other_way(items: Any) -> None:
    found = kernel.encode(items, 1, bytes(80), RECORD_BYTES_MAX, FRAME_BYTES_MAX)
    assert found is None


@pytest.mark.parametrize("arguments", [(0, bytes(80)), (-1, bytes(80)), (1, bytes(79)), (1 << 40, bytes(80))])
def test_numbers_that_make_no_sense_are_left_to_the_other_way(arguments: tuple[int, bytes]) -> None:
    records, header = arguments
    assert kernel.encode([b"x"], records, header, RECORD_BYTES_MAX, FRAME_BYTES_MAX) is None


def test_more_than_a_call_may_hold_is_left_to_the_other_way() -> None:
    one = codec.frames_of([b"x"] * 4, 2, topic_id=1)[0]
    assert kernel.encode([b"x"] * 4, 2, bytes(80), 10, len(one)) is not None
    assert kernel.encode([b"x"] * 4, 2, bytes(80), 10, len(one) - 1) is None


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.zeros((count, layout.HEADER_WORDS), dtype=np.uint64)


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 4), (4, 5)])
def test_rows_outside_of_a_matrix_are_an_error(start: int, stop: int) -> None:
    """A mistake of ours must not become somebody else's memory."""
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


def test_what_may_not_be_written_is_not() -> None:
    with pytest.raises((TypeError, BufferError)):
        kernel.take(bytes(80), 1, FRAME_BYTES_MAX, SEQ_MAX, 0)
    with pytest.raises((TypeError, BufferError)):
        kernel.seal(bytes(80), np.zeros(1, np.int64), rows(1), 0, 1, 1)


@given(st.lists(plain_frame(), min_size=1, max_size=5), st.integers(0, (1 << 64) - 1))
def test_seals_are_those_of_batch(pieces: Sequence[bytearray], salt: int) -> None:
    buffer = bytearray().join(pieces)
    batch = find(buffer)
    other, expected = bytearray(buffer), scan(bytearray(buffer))
    last = seal_rows(buffer, batch, 0, len(batch), salt)
    expected.words[:, layout.W_SEAL_XXH3] = frames.seals(expected.words, salt)
    frames.put_headers(frames.words_of(other), expected)
    assert last == int(expected.words[-1, layout.W_SEAL_XXH3])
    assert buffer == other
    assert (batch.words == expected.words).all()


SANITIZED = """
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("_kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
chance = random.Random(7)
for turn in range(4_000):
    count = chance.randint(1, 30)
    kind = chance.choice((chance.randbytes, bytes))
    payloads = [kind(chance.randint(0, 40)) for _ in range(count)]
    head = bytearray(80)
    head[4:8] = bytes((1, 1, 1, 0))
    head[40:48] = head[48:56] = (5).to_bytes(8, "little")
    buffer, offsets = kernel.encode(payloads, chance.randint(1, 9), bytes(head), 1 << 20, 1 << 26)
    kernel.stamp(buffer, offsets, 1, 2, 3, 4, True)
    frames = len(offsets) // 8 - 1
    whole = kernel.take(buffer, 1 << 40, 1 << 26, (1 << 63) - 1, 0)
    assert whole[2] == frames and whole[5] == 1, whole
    last = int.from_bytes(offsets[-16:-8], "little")
    for held in (2, 300, 1 << 16, (1 << 31) - 1, (1 << 32) - 1):
        lying = bytearray(buffer)
        lying[last + 32 : last + 36] = held.to_bytes(4, "little")
        lying[last + 80 :] = bytes(len(lying) - last - 80)
        kernel.take(lying, 1 << 40, 1 << 26, (1 << 63) - 1, 0)
    table, entries = whole[0], whole[1]
    words, places = memoryview(table)[: frames * 80], memoryview(table)[frames * 80 : frames * 88]
    kernel.number(words, entries, 0, frames, 1, 2, 3, 3)
    kernel.seal(buffer, places, words, 0, frames, 9)
    # Every length and count that a producer may invent, in a buffer that ends with its allocation.
    for _ in range(6):
        hostile = bytearray(buffer[: chance.randrange(0, len(buffer) + 1)])
        for _ in range(chance.randint(1, 4)):
            if hostile:
                places = (0, 1, 4, 32, 33, 35, 56, 58, 60, 80, 84, 88, chance.randrange(len(hostile)))
                at = chance.choice(places)
                value = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
                if at < len(hostile):
                    hostile[at] = value
        kernel.take(hostile, chance.choice((0, 1, 1 << 40)), 1 << 26, (1 << 63) - 1, 0)
print("clean")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_byte_outside_of_a_buffer_is_touched(tmp_path: Path) -> None:
    """RF-31: the same source under the address and the undefined-behaviour sanitizer, with hostile frames."""
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
        [sys.executable, "-c", SANITIZED, str(target)], capture_output=True, text=True, timeout=150,
        env=environment, check=False,
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


def test_where_it_is_missing_the_error_says_what_to_do() -> None:
    done = without_kernel(
        "try:\n    ringlog.connect\nexcept ringlog.errors.KernelMissing as e:\n    print(e.code, e)"
    )
    assert done.stdout.startswith("kernel_missing ringlog's compiled kernel is missing: reinstall"), (
        done.stderr
    )
    assert "no such file" in done.stdout


@pytest.mark.parametrize("command", ["ringlog.cli.main(['doctor'])", "supervisor.main()"])
def test_where_it_is_missing_a_command_says_so_in_one_line(command: str) -> None:
    done = without_kernel(f"import ringlog.cli, supervisor\nsys.argv = ['x']\nsys.exit({command})")
    assert done.returncode == 1
    assert done.stderr.startswith("ringlog's compiled kernel is missing")
    assert done.stderr.count("\n") == 1
