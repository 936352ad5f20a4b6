"""The table of idempotency keys and dedup ids: windows, order, bound."""

from __future__ import annotations

import pytest

from ringlog.digests import DIGEST_BYTES, digest_of_id, digest_of_key
from ringlog.topic.idempotency import IdempotencyEntry, IdempotencyKeys


def used(first_seq: int, created_us: int, window_ms: int = 0) -> IdempotencyEntry:
    return IdempotencyEntry(first_seq, 1, created_us, created_us, window_ms)


def test_a_key_is_valid_through_the_last_millisecond_of_its_window():
    """Both times are rounded down to milliseconds first."""
    keys = IdempotencyKeys()
    keys.remember(b"k", used(1, 10_999), 5)
    assert keys.find(b"k", 15_999, 5) == used(1, 10_999)
    assert keys.find(b"k", 16_000, 5) is None


def test_expired_keys_are_dropped():
    """The table contains only the keys of the window."""
    keys = IdempotencyKeys()
    for i in range(10_000):
        keys.remember(b"k%d" % i, used(i, i * 1_000), 100)
    assert len(keys) == 101
    assert keys.find(b"k9999", 9_999_000, 100) is not None


def test_a_full_table_evicts_the_oldest_key_and_counts_it():
    keys = IdempotencyKeys()
    for i in range(5):
        keys.remember(b"k%d" % i, used(i, 1_000), 1_000, most=3)
    assert keys.forgotten_early == 2
    assert keys.find(b"k0", 1_000, 1_000) is None
    assert keys.find(b"k4", 1_000, 1_000) is not None


def test_a_clock_that_steps_back_does_not_extend_a_window():
    """The table uses the latest time that it has seen."""
    keys = IdempotencyKeys()
    keys.remember(b"k", used(1, 0), 10)
    assert keys.find(b"other", 9_000, 10) is None
    assert keys.find(b"k", 2_000, 10) is not None
    assert keys.find(b"other", 11_000, 10) is None
    assert keys.find(b"k", 2_000, 10) is None


@pytest.mark.parametrize("own_ms", [0, 5])
@pytest.mark.parametrize("last_us", [9_000, 11_000], ids=["beside an earlier key", "in an empty table"])
def test_a_key_used_after_the_clock_stepped_back_is_known(own_ms, last_us):
    """Its window begins at the latest time that the table has seen, not before the first look at it."""
    keys = IdempotencyKeys()
    keys.remember(b"earlier", used(1, 0), 10)
    assert len(keys.items(last_us, 10)) == (last_us < 10_000)
    keys.remember(b"k", used(2, last_us - 8_000, window_ms=own_ms), 10)
    assert keys.find(b"k", last_us - 7_000, 10).first_seq == 2
    window_us = (own_ms or 10) * 1_000
    assert keys.find(b"k", last_us + window_us, 10).first_seq == 2
    assert keys.find(b"k", last_us + window_us + 1_000, 10) is None


def test_a_window_of_0_keeps_no_key():
    keys = IdempotencyKeys()
    keys.remember(b"k", used(1, 0), 0)
    assert len(keys) == 0
    keys.remember(b"k", used(1, 0), 10)
    assert keys.find(b"k", 0, 0) is None


def test_an_entry_with_its_own_window_expires_no_later_than_the_topics_window():
    """One call may set a shorter window. The entry is valid through the last millisecond of it."""
    keys = IdempotencyKeys()
    keys.remember(b"short", used(1, 10_999, window_ms=5), 100)
    keys.remember(b"usual", used(2, 10_999), 100)
    assert keys.find(b"short", 15_999, 100) == used(1, 10_999, window_ms=5)
    assert keys.find(b"short", 16_000, 100) is None
    assert keys.find(b"usual", 16_000, 100) is not None
    assert len(keys) == 1
    keys.remember(b"long", used(3, 16_000, window_ms=50), 100)
    assert keys.find(b"long", 36_000, 10) is None


def test_an_entrys_own_window_does_not_grow_with_the_topics_window():
    keys = IdempotencyKeys()
    keys.remember(b"k", used(1, 0, window_ms=50), 50)
    assert keys.find(b"k", 50_000, 1_000) is not None
    assert keys.find(b"k", 51_000, 1_000) is None


def test_a_full_table_evicts_the_entry_that_expires_first():
    """Each early eviction is counted."""
    keys = IdempotencyKeys()
    keys.remember(b"old", used(1, 0), 1_000, most=3)
    keys.remember(b"short", used(2, 1_000, window_ms=10), 1_000, most=3)
    keys.remember(b"new", used(3, 2_000), 1_000, most=3)
    keys.remember(b"newer", used(4, 3_000), 1_000, most=3)
    assert [key for key, _ in keys.items(3_000, 1_000)] == [b"old", b"new", b"newer"]
    keys.remember(b"newest", used(5, 4_000), 1_000, most=2)
    assert [key for key, _ in keys.items(4_000, 1_000)] == [b"newer", b"newest"]
    assert keys.forgotten_early == 3


def test_evicted_entries_with_short_windows_leave_no_memory():
    """An evicted entry frees its place, whatever its window was."""
    keys = IdempotencyKeys()
    for i in range(10_000):
        keys.remember(b"k%d" % i, used(i, i, window_ms=900 - i % 100), 1_000, most=10)
    assert len(keys) == 10
    assert len(keys._early) <= 2 * 10 + 65


def test_dedup_ids_are_stored_as_digests_and_never_equal_keys():
    """The digest is SHA-256, and ids and keys have different domains."""
    assert digest_of_id("").hex().startswith("e3b0c442")
    assert len({digest_of_id("x"), digest_of_key("x"), digest_of_id("x" * 4_000)}) == 3
    assert {len(digest_of_id("x" * size)) for size in (1, 4_000)} == {DIGEST_BYTES}
