"""Functions over many frames, compared with a walk that reads the frames one by one."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringlog.frame import batch as frames
from ringlog.frame import encode_frames, encode_records, frame, layout, open_frame, seal
from ringlog.frame.batch import FrameBatch, ScanEnd, scan
from ringlog.limits import FRAME_BYTES_MAX


def naive_scan(data: bytes, start: int, stop: int, most: int) -> tuple[list[int], int, ScanEnd]:
    """Do the same as scan, one frame at a time."""
    found: list[int] = []
    at = start
    while True:
        if at == stop:
            return found, at, ScanEnd.CLEAN
        if stop - at < 8:
            return found, at, ScanEnd.INVALID
        if len(found) >= most:
            return found, at, ScanEnd.LIMIT
        length = int.from_bytes(data[at : at + 4], "little")
        if length == 0:
            return found, at, ScanEnd.INVALID if any(data[at + 4 : at + 8]) else ScanEnd.CLEAN
        if length == layout.PAD_WORD:
            return found, at, ScanEnd.PAD
        total = length + 4
        if total < 80 or total % 8 or total > FRAME_BYTES_MAX:
            return found, at, ScanEnd.INVALID
        if at + total > stop:
            return found, at, ScanEnd.PARTIAL
        found.append(at)
        at += total


def bare(total: int, fill: int = 1) -> bytes:
    """Return a frame as scan sees it: a length and arbitrary bytes."""
    return (total - 4).to_bytes(4, "little") + bytes([fill]) * (total - 4)


runs = st.lists(
    st.tuples(st.sampled_from([80, 88, 88, 96, 104, 400]), st.integers(1, 12) | st.sampled_from([70, 600])),
    max_size=6,
)
tails = st.sampled_from(
    [
        b"",
        bytes(8),
        bytes(64),
        b"\xff" * 8,
        bytes(4) + b"\1" * 4,
        bare(96)[:88],
        bare(96)[:8],
        b"\x01" + bytes(15),
        (79).to_bytes(4, "little") + bytes(100),
        FRAME_BYTES_MAX.to_bytes(4, "little") + bytes(84),
    ]
)


@given(runs, tails, st.integers(0, 3), st.integers(0, 1_300) | st.just(1 << 62))
@example([(88, 8_192 + 64 + 8 + 9 + 5)], b"", 0, 1 << 62)
@example([(88, 20), (96, 1), (88, 20)], bytes(8), 0, 17)
@settings(max_examples=200)
def test_scan_finds_what_a_naive_walk_finds(
    runs: list[tuple[int, int]], tail: bytes, lead: int, most: int
) -> None:
    body = b"".join(bare(total, i & 255) * count for i, (total, count) in enumerate(runs)) + tail
    data = bare(80) * lead + body[: len(body) & ~7]
    found = scan(data, 80 * lead, frames_max=most)
    assert (found.offsets.tolist(), found.stop, found.end) == naive_scan(data, 80 * lead, len(data), most)
    assert bool(found.reason) == (found.end in {ScanEnd.INVALID, ScanEnd.PARTIAL})
    for offset, row in zip(found.offsets.tolist(), found.words, strict=True):
        assert row.tobytes() == data[offset : offset + 80]


@given(runs, st.integers(0, 400))
def test_scan_of_a_range_never_reads_past_its_stop(runs: list[tuple[int, int]], cut: int) -> None:
    data = b"".join(bare(total) * count for total, count in runs) + bare(80)
    stop = max(0, len(data) - 8 * cut)
    found = scan(data, 0, stop)
    assert (found.offsets.tolist(), found.stop, found.end) == naive_scan(data, 0, stop, 1 << 62)
    assert found.stop <= stop


def test_scan_that_starts_after_the_end_of_the_buffer_is_invalid() -> None:
    found = scan(bytes(64), 128)
    assert (len(found), found.end) == (0, ScanEnd.INVALID)
    assert found.reason == "unexpected bytes after the last frame"


def test_scan_of_nothing_is_empty_and_clean() -> None:
    found = scan(b"")
    assert (len(found), found.stop, found.end) == (0, 0, ScanEnd.CLEAN)
    assert len(frames.body_hashes(b"", found)) == len(frames.seals(found.words, 1)) == 0
    assert frames.first_bad_body(b"", found) is None
    assert frames.first_bad_seal(found, 1) is None
    assert not frames.malformed(found.words).any()


payload_runs = st.lists(
    st.tuples(st.binary(max_size=40) | st.just(b"x" * 100), st.integers(1, 9)), min_size=1, max_size=5
)


def joined(runs: list[tuple[bytes, int]]) -> bytearray:
    return encode_frames([payload for payload, count in runs for _ in range(count)], 1, topic_id=3)[0]


@given(payload_runs, st.randoms(use_true_random=False))
def test_body_hashes_match_each_body_in_any_order_of_rows(
    runs: list[tuple[bytes, int]], random: object
) -> None:
    """body_hashes does not treat rows of one length as a run if they are out of order."""
    buffer = joined(runs)
    whole = scan(buffer)
    order = list(range(len(whole)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for batch in (whole, whole.take(np.array(order)), whole.take(slice(0, None, 2))):
        expected = [
            xxhash.xxh3_64_intdigest(bytes(buffer[a + 80 : a + n]))
            for a, n in zip(batch.offsets.tolist(), batch.total_bytes.tolist(), strict=True)
        ]
        assert frames.body_hashes(buffer, batch).tolist() == expected
        assert frames.first_bad_body(buffer, batch) is None


def test_swapped_frames_of_equal_length_keep_their_own_hashes() -> None:
    """The first and last rows are where a run would have them; the rows between are not."""
    buffer, offsets = encode_frames([bytes([i]) * 16 for i in range(6)], 1, topic_id=1)
    batch = scan(buffer).take(np.array([0, 2, 1, 3, 4, 5]))
    assert int(batch.offsets[-1] - batch.offsets[0]) == 5 * int(offsets[1])
    assert frames.first_bad_body(buffer, batch) is None


@given(payload_runs, st.data())
def test_first_bad_body_returns_the_damaged_row(runs: list[tuple[bytes, int]], data: st.DataObject) -> None:
    buffer = joined(runs)
    batch = scan(buffer)
    row = data.draw(st.integers(0, len(batch) - 1))
    at = data.draw(st.integers(80, int(batch.total_bytes[row]) - 1))
    buffer[int(batch.offsets[row]) + at] ^= 0x10
    assert frames.first_bad_body(buffer, batch) == row


@given(payload_runs, st.integers(0, (1 << 64) - 1), st.data())
def test_seals_of_a_batch_equal_single_seals_and_damage_is_found(
    runs: list[tuple[bytes, int]], seed: int, data: st.DataObject
) -> None:
    buffer = joined(runs)
    batch = scan(buffer)
    batch.words[:, layout.W_BASE_SEQ] = np.arange(len(batch), dtype=np.uint64)
    batch.words[:, layout.W_SEAL_XXH3] = frames.seals(batch.words, seed)
    frames.write_headers(frames.words_of(buffer), batch)
    again = scan(buffer)
    assert frames.first_bad_seal(again, seed) is None
    assert frames.first_bad_seal(again, seed ^ 1) == 0
    copy = bytearray(buffer)
    for row, offset in enumerate(batch.offsets.tolist()):
        assert open_frame(buffer, offset, seed=seed).base_seq == row
        assert seal(copy, seed, offset) == int(batch.words[row, layout.W_SEAL_XXH3])
    assert copy == buffer
    row = data.draw(st.integers(0, len(batch) - 1))
    again.words[row, data.draw(st.integers(0, 8))] ^= np.uint64(1)
    assert frames.first_bad_seal(again, seed) == row


def test_columns_of_the_word_matrix_equal_the_header_fields() -> None:
    buffer = frame(encode_records([b"a", b"b"], tags=["t", "u"]), topic_id=1, epoch=9) + frame(
        encode_records([b"c"]), topic_id=2
    )
    words = scan(buffer).words
    views = [open_frame(buffer, 0, seed=None), open_frame(buffer, int(scan(buffer).offsets[1]), seed=None)]
    for column, name in (
        (frames.types_of, "type"),
        (frames.columns_of, "columns"),
        (frames.counts_of, "records"),
        (frames.epochs_of, "epoch"),
        (frames.raw_lens_of, "raw_len"),
        (frames.codecs_of, "codec"),
        (frames.flags_of, "flags"),
    ):
        assert column(words).tolist() == [getattr(view.header, name) for view in views], name


def test_taking_rows_keeps_their_headers_together() -> None:
    batch: FrameBatch = scan(joined([(b"a", 3), (b"bcdefghij", 2)]))
    for rows in (slice(1, 4), np.array([4, 0]), np.array([True, False, False, True, True])):
        part = batch.take(rows)
        assert part.offsets.tolist() == batch.offsets[rows].tolist()
        assert part.total_bytes.tolist() == batch.total_bytes[rows].tolist()


def test_scan_refuses_a_buffer_that_is_not_whole_words() -> None:
    with pytest.raises(ValueError, match="multiple"):
        scan(b"\0" * 12)
