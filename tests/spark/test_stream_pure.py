"""Offsets of a stream and what one micro-batch may take: tables and properties, no engine and no Spark."""

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


# -- offsets (SK-17, SP-8) ----------------------------------------------------------------------------


@given(places)
def test_an_offset_comes_back_as_the_places_it_was_made_from(found):
    through_json = json.loads(json.dumps(encode(LOG, found)))
    assert decode(through_json, LOG) == found


@given(places, st.randoms())
def test_equal_places_give_equal_text_whatever_their_order(found, random):
    shuffled = list(found.items())
    random.shuffle(shuffled)
    assert json.dumps(encode(LOG, found)) == json.dumps(encode(LOG, dict(shuffled)))


@given(places)
def test_text_that_spark_brought_back_is_the_text_that_was_given(found):
    text = json.dumps(encode(LOG, found))
    assert json.dumps(encode(LOG, decode(json.loads(text), LOG))) == text
    assert list(json.loads(text)) == sorted(json.loads(text)), "keys are in order at every level"


def test_the_beginning_is_told_from_a_stream_of_no_topics():
    """A topic that appears then is new to the one and old to the other."""
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
def test_what_is_no_offset_of_this_log_is_refused_with_the_reason(name):
    offset, words = REFUSED[name]
    with pytest.raises(CheckpointRefused) as e:
        decode(offset, LOG)
    assert words in str(e.value)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_a_newer_version_is_told_before_the_log_since_all_else_may_mean_something_different_in_it():
    with pytest.raises(CheckpointRefused, match="newer"):
        decode({"log": "f" * 16, "topics": "?", "v": 9}, LOG)


# -- limits (SK-19) -----------------------------------------------------------------------------------

lags = st.dictionaries(names, st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 1 << 40)), max_size=8)


@given(lags, st.integers(1, 1 << 41), st.integers(0, 1 << 33))
def test_shares_use_the_limit_up_and_exceed_neither_it_nor_what_waits(waiting, most, turn):
    shares = admit_offsets(waiting, most, turn)
    assert sum(shares.values()) == min(most, sum(waiting.values()))
    assert all(0 <= count <= waiting[topic] for topic, count in shares.items())


@given(lags.filter(lambda found: any(found.values())), st.integers(1, 1 << 41), st.integers(0, 1 << 33))
def test_shares_follow_what_waits(waiting, most, turn):
    """No further than two positions from the exact part: one for rounding, one for the turn."""
    total = sum(waiting.values())
    for topic, count in admit_offsets(waiting, most, turn).items():
        exact = min(most, total) * waiting[topic] / total
        assert abs(count - exact) <= 2 + exact * 1e-9


@given(lags, st.integers(1, 50), st.integers(0, 1 << 33))
def test_no_topic_starves_however_much_waits_in_the_others(waiting, most, turn):
    served = {
        topic
        for step in range(len(waiting))
        for topic, n in admit_offsets(waiting, most, turn + step).items()
        if n
    }
    assert served == {topic for topic, lag in waiting.items() if lag}


def test_beside_a_topic_that_never_empties_a_small_one_is_served_in_time():
    """Rounding alone would give it nothing: its part of 100 is far below one, batch after batch."""
    waiting = {"flood": 10**9, "drop": 1}
    exact = 100 * waiting["drop"] // sum(waiting.values())
    assert exact == 0
    assert [admit_offsets(waiting, 100, turn).get("drop", 0) for turn in range(4)].count(1) >= 2


def test_turns_go_round_by_name():
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
def test_bytes_are_chosen_in_whole_frames_and_exceed_the_limit_by_the_first_alone(steps, most, turn):
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
def test_bytes_are_not_left_over_while_a_frame_would_fit(steps, most, turn):
    chosen = admit_bytes(steps, most, turn)
    left = most - used(steps, chosen)
    for topic, found in steps.items():
        behind = [step for step in found if step.until > chosen.get(topic, 0)]
        assert not behind or behind[0].bytes > left


@given(frames(), st.integers(1, 3_000), st.integers(0, 1 << 33))
def test_by_bytes_no_topic_starves_either(steps, most, turn):
    served = {topic for step in range(len(steps)) for topic in admit_bytes(steps, most, turn + step)}
    assert served == {topic for topic, found in steps.items() if found}
