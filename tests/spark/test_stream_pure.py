"""Offsets of a stream and the limits of one micro-batch: tables and properties, without engine and Spark."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.client.read.pages import Cursor
from ringlog.limits import SEQ_MAX
from ringlog.spark.admission import StreamAdmissionStep, admit_bytes, admit_offsets, rotate_topics
from ringlog.spark.offsets import BEGINNING, CheckpointRefused, decode, encode

LOG = "0123456789abcdef"
names = st.text("abcdef.:-_01", min_size=1, max_size=8)
places = st.dictionaries(
    names, st.builds(Cursor, st.integers(1, 1 << 40), st.integers(0, SEQ_MAX)), max_size=6
)


# -- offsets ------------------------------------------------------------------------------------------


@given(places)
def test_decode_returns_the_encoded_positions(found):
    through_json = json.loads(json.dumps(encode(LOG, found)))
    assert decode(through_json, LOG) == found


@given(places, st.randoms())
def test_equal_positions_give_equal_text_in_any_order(found, random):
    shuffled = list(found.items())
    random.shuffle(shuffled)
    assert json.dumps(encode(LOG, found)) == json.dumps(encode(LOG, dict(shuffled)))


@given(places)
def test_an_offset_keeps_its_text_after_decode_and_encode(found):
    text = json.dumps(encode(LOG, found))
    assert json.dumps(encode(LOG, decode(json.loads(text), LOG))) == text
    assert list(json.loads(text)) == sorted(json.loads(text)), "keys are in order at every level"


def test_the_beginning_differs_from_an_offset_without_topics():
    """A topic that appears later belongs to the beginning in one case, and is new to the query in the
    other."""
    assert decode(encode(LOG, BEGINNING), LOG) is BEGINNING
    assert decode(encode(LOG, {}), LOG) == {}
    assert encode(LOG, BEGINNING) != encode(LOG, {})


REFUSED = {
    "another log": ({"log": "f" * 16, "topics": {}, "v": 1}, "another data directory"),
    "newer": ({"log": LOG, "topics": {}, "v": 2}, "newer ringlog"),
    "no version": ({"log": LOG, "topics": {}}, "not an offset"),
    "a truth for a version": ({"log": LOG, "topics": {}, "v": True}, "not an offset"),
    "version 0": ({"log": LOG, "topics": {}, "v": 0}, "not an offset"),
    "empty": ({}, "not an offset"),
    "topics of nothing": ({"log": LOG, "topics": None, "v": 1}, "not an offset"),
    "topics in a list": ({"log": LOG, "topics": [1], "v": 1}, "not an offset"),
    "plain position": ({"log": LOG, "topics": {"t": 5}, "v": 1}, "[epoch, seq]"),
    "three numbers": ({"log": LOG, "topics": {"t": [1, 2, 3]}, "v": 1}, "[epoch, seq]"),
    "text": ({"log": LOG, "topics": {"t": ["1", 2]}, "v": 1}, "[epoch, seq]"),
    "negative": ({"log": LOG, "topics": {"t": [1, -1]}, "v": 1}, "[epoch, seq]"),
    "no life": ({"log": LOG, "topics": {"t": [0, 1]}, "v": 1}, "[epoch, seq]"),
    "too high": ({"log": LOG, "topics": {"t": [1, SEQ_MAX + 1]}, "v": 1}, "[epoch, seq]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_or_foreign_offset_is_refused_with_the_reason(name):
    offset, words = REFUSED[name]
    with pytest.raises(CheckpointRefused) as e:
        decode(offset, LOG)
    assert words in str(e.value)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_the_version_of_an_offset_is_checked_before_its_log():
    with pytest.raises(CheckpointRefused, match="newer"):
        decode({"log": "f" * 16, "topics": "?", "v": 9}, LOG)


# -- limits -------------------------------------------------------------------------------------------

lags = st.dictionaries(names, st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 1 << 40)), max_size=8)


@given(lags, st.integers(1, 1 << 41), st.integers(0, 1 << 33))
def test_shares_use_the_whole_limit_and_exceed_neither_it_nor_the_lag(waiting, most, turn):
    shares = admit_offsets(waiting, most, turn)
    assert sum(shares.values()) == min(most, sum(waiting.values()))
    assert all(0 <= count <= waiting[topic] for topic, count in shares.items())


@given(lags.filter(lambda found: any(found.values())), st.integers(1, 1 << 41), st.integers(0, 1 << 33))
def test_shares_are_proportional_to_the_lag(waiting, most, turn):
    """The difference from the exact share is at most two: one for rounding and one for the rotation."""
    total = sum(waiting.values())
    for topic, count in admit_offsets(waiting, most, turn).items():
        exact = min(most, total) * waiting[topic] / total
        assert abs(count - exact) <= 2 + exact * 1e-9


@given(lags, st.integers(1, 50), st.integers(0, 1 << 33))
def test_no_topic_starves_for_any_lag_of_the_others(waiting, most, turn):
    served = {
        topic
        for step in range(len(waiting))
        for topic, n in admit_offsets(waiting, most, turn + step).items()
        if n
    }
    assert served == {topic for topic, lag in waiting.items() if lag}


def test_a_small_topic_is_served_next_to_a_topic_with_a_huge_lag():
    """With rounding alone its share of 100 would be 0 in every batch."""
    waiting = {"flood": 10**9, "drop": 1}
    exact = 100 * waiting["drop"] // sum(waiting.values())
    assert exact == 0
    assert [admit_offsets(waiting, 100, turn).get("drop", 0) for turn in range(4)].count(1) >= 2


def test_rotate_topics_rotates_by_name():
    assert [rotate_topics(["b", "c", "a"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert rotate_topics([], 3) == []


@st.composite
def frames(draw):
    sizes = draw(st.dictionaries(names, st.lists(st.integers(1, 5_000), max_size=12), max_size=5))
    return {
        topic: [StreamAdmissionStep(10 * (i + 1), size) for i, size in enumerate(found)]
        for topic, found in sizes.items()
    }


def used(steps, chosen):
    return sum(step.bytes for topic, until in chosen.items() for step in steps[topic] if step.until <= until)


@given(frames(), st.integers(1, 30_000), st.integers(0, 1 << 33))
def test_admit_bytes_admits_whole_frames_and_exceeds_the_limit_only_by_the_first(steps, most, turn):
    chosen = admit_bytes(steps, most, turn)
    ends = {topic: {step.until for step in found} for topic, found in steps.items()}
    assert all(until in ends[topic] for topic, until in chosen.items())
    assert bool(chosen) == any(steps.values()), "something always goes on"
    taken = used(steps, chosen)
    if taken > most:
        assert len(chosen) == 1
        ((topic, until),) = chosen.items()
        assert until == steps[topic][0].until


@given(frames(), st.integers(1, 30_000), st.integers(0, 1 << 33))
def test_admit_bytes_leaves_no_frame_that_would_fit(steps, most, turn):
    chosen = admit_bytes(steps, most, turn)
    left = most - used(steps, chosen)
    for topic, found in steps.items():
        behind = [step for step in found if step.until > chosen.get(topic, 0)]
        assert not behind or behind[0].bytes > left


@given(frames(), st.integers(1, 3_000), st.integers(0, 1 << 33))
def test_no_topic_starves_under_a_byte_limit(steps, most, turn):
    served = {topic for step in range(len(steps)) for topic in admit_bytes(steps, most, turn + step)}
    assert served == {topic for topic, found in steps.items() if found}
