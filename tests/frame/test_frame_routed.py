"""Routed frames: one payload for many topics, read as the appends that the frame represents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.errors import FrameInvalid, UsageError
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame, layout, open_frame
from ringlog.frame.routed_frame import CopyRow, resolve_copies, routed_content_of, routed_frame
from ringlog.frame.view import open_row
from ringlog.limits import ROUTER_HOPS_MAX
from ringlog.types import Codec
from ringlog.verify.frame_decoder import VerifyError, decode_frame
from tests.support.frame_samples import GOLDEN_SEED, any_frame, encoded, record_columns

GOLDEN = Path(__file__).parents[1] / "golden"
COPIES = [
    CopyRow(42, 7, 1_700_000_000_000_000, 3, 99, 12, 2),
    CopyRow(43, 1, 1_700_000_000_000_001, 4, 98, 12, 3),
]


def routed(
    appended: bytes | bytearray, rows: list[CopyRow], *, hops: int = 1, seed: int = GOLDEN_SEED
) -> bytearray:
    """Return the sealed frame with copies of an append."""
    made = routed_frame(routed_content_of(appended, frames.scan(appended), 0, hops=hops), rows)
    words = frames.words_of(made)
    words[layout.W_SEAL_XXH3] = frames.seals(words[: layout.HEADER_WORDS].reshape(1, -1), seed)[0]
    return made


def sample() -> bytearray:
    return routed(
        frame(encode_records([b"hello", b"ringlog!"], tags=["a", None]), topic_id=0), COPIES, hops=2
    )


@pytest.mark.parametrize(("place", "empty"), [("routed", None), ("v1/routed", "")])
def test_both_decoders_read_the_golden_routed_frame(place: str, empty: str | None) -> None:
    """The engine's decoder and the verifier's decoder read the golden frames of both versions; only version 2
    is written."""
    golden = bytes.fromhex((GOLDEN / place / "two_copies.hex").read_text())
    assert (bytes(sample()) == golden) == (place == "routed"), "version 1 is written no more"
    found = decode_frame(golden, 0, GOLDEN_SEED)
    assert [(copy.topic_id, copy.base_seq, copy.records, copy.epoch) for copy in found.copies] == [
        (42, 7, 2, 3), (43, 1, 2, 4),
    ]  # fmt: skip
    assert [(copy.router, copy.cursor) for copy in found.copies] == [(99, 12), (98, 12)]
    assert found.columns == {"payload": [b"hello", b"ringlog!"], "tag": ["a", empty]}
    assert len(open_frame(golden, seed=GOLDEN_SEED)) == 0
    copies = resolve_copies(golden, frames.scan(golden), GOLDEN_SEED)
    assert [open_row(golden, copies, row).records().tags for row in range(2)] == [["a", None]] * 2


def test_copies_in_a_buffer_verify_as_appends():
    """Each copy has its own seqs, stamp, class and hops."""
    before = frame(encode_records([b"x"]), topic_id=1)
    buffer = bytes(before) + bytes(sample()) + bytes(before)
    found = resolve_copies(buffer, frames.scan(buffer), GOLDEN_SEED)
    assert len(found) == 4
    assert found.stop == len(buffer)
    assert found.stored_offsets.tolist() == [0, len(before), len(before), len(buffer) - len(before)]
    copies = found.take(slice(1, 3))
    assert frames.first_bad_seal(copies, GOLDEN_SEED) is None
    assert frames.first_bad_body(buffer, copies) is None
    assert not frames.malformed(found.words).any()
    views = [open_row(buffer, copies, row) for row in range(2)]
    assert [(v.topic_id, v.base_seq, v.commit_ts, v.header.epoch, v.header.hops) for v in views] == [
        (42, 7, 1_700_000_000_000_000, 3, 2), (43, 1, 1_700_000_000_000_001, 4, 2),
    ]  # fmt: skip
    assert [view.to_list() for view in views] == [[b"hello", b"ringlog!"]] * 2
    assert copies.copies is not None
    assert copies.copies.routers.tolist() == [99, 98]
    assert copies.copies.cursors.tolist() == [12, 12]


def test_resolve_copies_of_one_topic_verifies_only_its_copies():
    made = sample()
    batch = frames.scan(made)
    assert resolve_copies(made, batch, GOLDEN_SEED, topic_id=43).words[:, layout.W_TOPIC].tolist() == [43]
    made[-1] ^= 1
    assert len(resolve_copies(made, batch, GOLDEN_SEED, topic_id=44)) == 0
    with pytest.raises(FrameInvalid, match="body does not match its checksum"):
        resolve_copies(made, batch, GOLDEN_SEED, topic_id=43)
    with pytest.raises(FrameInvalid, match="header does not match its seal"):
        resolve_copies(sample(), batch, GOLDEN_SEED + 1, topic_id=43)


def test_a_routed_frame_without_copies_or_with_too_many_hops_is_refused():
    appended = frame(encode_records([b"x"]), topic_id=0)
    batch = frames.scan(appended)
    with pytest.raises(UsageError):
        routed_frame(routed_content_of(appended, batch, 0, hops=1), [])
    with pytest.raises(UsageError):
        routed_content_of(appended, batch, 0, hops=ROUTER_HOPS_MAX + 1)


@settings(max_examples=60, deadline=None)
@given(record_columns(), st.sampled_from(list(Codec)), st.integers(1, 5), st.integers(0, ROUTER_HOPS_MAX))
def test_a_copy_reads_as_the_append_that_it_copies(columns, codec, many, hops):
    appended = frame(encoded(columns), topic_id=0, codec=codec)
    rows = [CopyRow(n + 1, 10 * n + 1, n, 1, n + 1, n + 1, 2) for n in range(many)]
    made = routed(appended, rows, hops=hops)
    expected = open_frame(appended, seed=None).records()
    found = resolve_copies(made, frames.scan(made), GOLDEN_SEED)
    for n in range(many):
        records = open_row(made, found, n).records()
        assert records.seqs == [10 * n + 1 + i for i in range(len(expected.seqs))]
        assert records.payloads == expected.payloads
        assert records.tags == expected.tags
        assert records.headers == expected.headers
    decoded = decode_frame(bytes(made), 0, GOLDEN_SEED)
    assert [copy.router for copy in decoded.copies] == [row.router for row in rows]


@settings(max_examples=150, deadline=None)
@given(any_frame(), st.data())
def test_the_decoders_agree_on_damaged_routed_frames(appended, data):
    """For every damaged routed frame, either both decoders accept it or both refuse it."""
    if appended[4] != layout.FrameType.APPEND:
        return
    made = routed(appended, COPIES)
    at = data.draw(st.integers(10, len(made) // 8 - 1))
    words = frames.words_of(made)
    words[at] = np.uint64(data.draw(st.one_of(st.integers(0, 8), st.integers(0, (1 << 64) - 1))))
    words[layout.W_BODY_XXH3] = frames.body_hashes(made, frames.scan(made))[0]
    try:
        open_frame(made, seed=None)
        is_taken = True
    except FrameInvalid:
        is_taken = False
    try:
        decode_frame(bytes(made))
        is_read = True
    except VerifyError:
        is_read = False
    assert is_taken == is_read
