"""A request that crashed two incarnations of its shard is refused. The engine's topics survive."""

from __future__ import annotations

import os

import pytest

import ringlog
from ringlog.actors.wal_shard.requests.poison_requests import PoisonRequests, fingerprint
from ringlog.envelope import messages as m
from ringlog.environment import STOP_POINTS
from ringlog.errors import Internal
from ringlog.limits import POISON_CRASHES, POISON_CRASHES_REMEMBERED_MAX, RESTART_MAX_DEFAULT
from ringlog.testing import engine

DELETE = m.RecordsDelete("t", 2)


def died(directory, message=DELETE, attachment=None, times=1):
    """Record this many crashes with this request in hand, each by another incarnation."""
    for _ in range(times):
        PoisonRequests(str(directory), 0).record_crash(message, attachment)
    return PoisonRequests(str(directory), 0)


def test_a_request_is_not_refused_after_one_crash(tmp_path):
    deadly = died(tmp_path)
    deadly.require_not_poison(DELETE)
    assert 1 < POISON_CRASHES < RESTART_MAX_DEFAULT


def test_a_request_that_ended_two_incarnations_is_refused_and_no_other(tmp_path):
    deadly = died(tmp_path, DELETE, bytearray(b"a"), times=POISON_CRASHES)
    with pytest.raises(Internal, match="crashed 2 times"):
        deadly.require_not_poison(m.RecordsDelete("t", 2), b"a")
    for message, attachment in ((DELETE, b"b"), (DELETE, None), (m.RecordsDelete("t", 3), b"a")):
        deadly.require_not_poison(message, attachment)
    PoisonRequests(str(tmp_path), 1).require_not_poison(DELETE, b"a")


def test_the_fingerprint_of_a_request_depends_on_its_content_and_kind():
    assert fingerprint(m.TopicResolve("t")) == fingerprint(m.TopicResolve("t"))
    assert fingerprint(m.TopicResolve("t")) != fingerprint(m.TopicState("t"))


def test_the_number_of_remembered_crashes_is_bounded_and_the_latest_count(tmp_path):
    died(tmp_path, DELETE, times=POISON_CRASHES)
    for n in range(POISON_CRASHES_REMEMBERED_MAX - POISON_CRASHES):
        died(tmp_path, m.RecordsDelete("t", 100 + n))
    with pytest.raises(Internal):
        PoisonRequests(str(tmp_path), 0).require_not_poison(DELETE)
    died(tmp_path, m.RecordsDelete("t", 99)).require_not_poison(DELETE)
    assert os.path.getsize(tmp_path / "deadly-00") == 8 + 8 * POISON_CRASHES_REMEMBERED_MAX


@pytest.mark.parametrize("data", [b"", b"RLDEADL", b"something else", b"RLDEADLY" + bytes(13)])
def test_an_invalid_crash_file_is_ignored(tmp_path, data):
    path = tmp_path / "deadly-00"
    path.write_bytes(data)
    path.chmod(0o600)
    PoisonRequests(str(tmp_path), 0).require_not_poison(DELETE)
    with pytest.raises(Internal):
        died(tmp_path, times=POISON_CRASHES).require_not_poison(DELETE)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_engine_outlives_a_request_that_breaks_its_shard():
    """Its client receives an error. All other clients only see a pause."""
    plan = ";".join(["delete_in_hand:1:raise"] * POISON_CRASHES)
    with (
        engine(environ={STOP_POINTS: plan}, wal={"shards": 1}) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):
        client.append_many("t", [b"1", b"2", b"3"])
        with pytest.raises(Internal, match="crashed 2 times"):
            client.topics.delete_records("t", before_seq=2)
        assert client.append("t", b"4").first_seq == 4
        assert client.topics.state("t").count == 4, "nothing was deleted"
        client.topics.delete_records("t", before_seq=3)
        assert client.topics.state("t").count == 2, "another request of this kind must be accepted"
        with pytest.raises(Internal):
            client.topics.delete_records("t", before_seq=2)
