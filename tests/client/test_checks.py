"""Argument checks: values that are not numbers or names are refused with the parameter's name.

NumPy numbers count as numbers.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ringlog.client.requests.validation import WHOLE_MAX, check_group_limits, check_int, check_str
from ringlog.errors import UsageError

NO_NUMBERS: list[Any] = [
    None, "1", b"1", True, np.bool_(1), 1.5, float("nan"), float("inf"), Fraction(2, 1), [], {}, object(),
]  # fmt: skip


@pytest.mark.parametrize("given", [3, 3.0, np.int64(3), np.uint8(3), np.float64(3)])
def test_check_int_accepts_whole_numbers_of_any_type(given: Any) -> None:
    found = check_int(given, "limit")
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("given", NO_NUMBERS)
def test_check_int_refuses_other_values_by_name(given: Any) -> None:
    with pytest.raises(UsageError, match="lease_ms"):
        check_int(given, "lease_ms")


@pytest.mark.parametrize("given", [WHOLE_MAX + 1, -WHOLE_MAX - 1, 1e300])
def test_check_int_refuses_numbers_that_exceed_the_wire_format(given: Any) -> None:
    assert check_int(WHOLE_MAX, "limit") == WHOLE_MAX
    with pytest.raises(UsageError, match=f"limit must be from {-WHOLE_MAX} to {WHOLE_MAX}"):
        check_int(given, "limit")


@pytest.mark.parametrize("given", [None, 5, b"name", ["name"]])
def test_check_str_refuses_other_values_by_name(given: Any) -> None:
    assert check_str("name", "node") == "name"
    with pytest.raises(UsageError, match="node must be a str"):
        check_str(given, "node")


def test_check_group_limits_checks_limits_and_ignores_other_options() -> None:
    assert check_group_limits({"max_in_flight": np.int64(5), "create": False}) == {
        "max_in_flight": 5, "create": False,
    }  # fmt: skip
    with pytest.raises(UsageError, match="min_idle_ms"):
        check_group_limits({"min_idle_ms": "5"})
    with pytest.raises(UsageError, match="dead_letter"):
        check_group_limits({"dead_letter": 5})


@pytest.mark.slow
def test_queues_and_groups_refuse_bad_arguments_and_keep_working(client, ringlog_topic) -> None:
    """No refused call waits for a reply of the engine."""
    name = ringlog_topic()
    client.topics.create(name, type="queue")
    queue = client.queue(name)
    queue.put_many([b"1", b"2"])
    refused = [
        lambda: client.queue(5), lambda: client.queue(name, node=5), lambda: client.append(5, b""),
        lambda: client.producer(5), lambda: client.producer(name, name=5), lambda: client.topics.create(5),
        lambda: client.topics.delete(None), lambda: client.topics.state(5), lambda: client.group(name, 5),
        lambda: client.group(name, "g", mode=5), lambda: client.group(name, "g", max_in_flight=1.5),
        lambda: queue.claim("1"), lambda: queue.claim(1, wait_ms=None), lambda: queue.claim(1, lease_ms=1.5),
        lambda: queue.claim(1, lease_ms=1 << 70), lambda: next(queue.jobs(max_in_flight=None)),
        lambda: next(queue.batches("5")), lambda: next(queue.jobs(lease_ms="1")),
        lambda: queue.nack([], delay_ms="1"), lambda: queue.nack([], reason=5), lambda: queue.extend([], 1.5),
        lambda: queue.pending(None), lambda: queue.pending(after="x"),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(UsageError):
            call()
    job = queue.claim(np.int64(1), lease_ms=np.int64(60_000))[0]
    queue.extend([job], np.uint32(30_000))
    with pytest.raises(UsageError):
        queue.reject(job, 5)
    job.nack(delay_ms=np.int16(0))
    assert [each.data for each in queue.claim(2)] == [b"1", b"2"]
