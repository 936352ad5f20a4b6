"""The key table by itself: window, order, bound (I-3, I-11, I-12)."""

from __future__ import annotations

from ringlog.topic.idempotency import IdempotencyKeys, Remembered


def used(first_seq: int, created_us: int) -> Remembered:
    return Remembered(first_seq, 1, created_us, created_us)


def test_a_key_is_valid_through_the_last_millisecond_of_its_window():
    """I-3, CV-3: both instants are floored to milliseconds first."""
    keys = IdempotencyKeys()
    keys.remember("k", used(1, 10_999), 5)
    assert keys.find("k", 15_999, 5) == used(1, 10_999)
    assert keys.find("k", 16_000, 5) is None


def test_expired_keys_are_dropped_once_each():
    """I-11: the table holds what the window holds."""
    keys = IdempotencyKeys()
    for i in range(10_000):
        keys.remember(f"k{i}", used(i, i * 1_000), 100)
    assert len(keys) == 101
    assert keys.find("k9999", 9_999_000, 100) is not None


def test_the_bound_forgets_the_oldest_early_and_counts_it():
    keys = IdempotencyKeys(most=3)
    for i in range(5):
        keys.remember(f"k{i}", used(i, 1_000), 1_000)
    assert keys.forgotten_early == 2
    assert keys.find("k0", 1_000, 1_000) is None
    assert keys.find("k4", 1_000, 1_000) is not None


def test_a_clock_that_steps_back_extends_nothing():
    """I-12, CK-5."""
    keys = IdempotencyKeys()
    keys.remember("k", used(1, 0), 10)
    assert keys.find("other", 9_000, 10) is None
    assert keys.find("k", 2_000, 10) is not None
    assert keys.find("other", 11_000, 10) is None
    assert keys.find("k", 2_000, 10) is None


def test_without_a_window_nothing_is_kept():
    keys = IdempotencyKeys()
    keys.remember("k", used(1, 0), 0)
    assert len(keys) == 0
    keys.remember("k", used(1, 0), 10)
    assert keys.find("k", 0, 0) is None
