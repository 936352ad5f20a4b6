"""`ringlog metrics`: every number of a status in the Prometheus text format."""

from __future__ import annotations

import json
import signal
import urllib.request
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import ringlog
from ringlog.cli.metrics import StatusCollector, address_of
from ringlog.cli.outcome import CliExit
from ringlog.envelope.messages import (
    DeliveryStatus,
    EngineStatusReply,
    GroupsStatus,
    PressureStatus,
    ProcessStatus,
    QueuesStatus,
)
from ringlog.errors import NotConnected, UsageError
from ringlog.testing.real_engine import wait_until
from tests.support.shell import Shell


def numbers(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return every sample by its name and the values of its labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sampled(status: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    return numbers(generate_latest(StatusCollector(lambda: status)).decode())


FULL = EngineStatusReply(
    "id", "0.1.0", "degraded", 12.5, "/data", 2, 3, 1 << 30,
    [
        ProcessStatus("wal_shard-00", "wal_shard", 7, "ready", 3, 2, 10.0, 0.25, 0.5, 4096, ""),
        ProcessStatus("gateway", "gateway", 0, "given_up", 1, 5, 0.0, 0.0, 0.0, 0, "crash"),
    ],
    0.75, [PressureStatus("instance", 0.9, "shed", 0.1, 0.2, 0.3, 0.004, 11, 1.5)],
    DeliveryStatus([1, 0, 2], 4, 5, 6, 7, 8, 0.001, 0.5), 9, 10,
    QueuesStatus(1, 20, 3, 4, 5, 60, 50, 6, 2, 1), GroupsStatus(2, 30, 4, 5, 6.5),
)  # fmt: skip


def test_every_part_of_a_status_has_a_metric() -> None:
    found = sampled(FULL)
    expected = {
        ("ringlog_up", ()): 1, ("ringlog_ready", ()): 0, ("ringlog_uptime_seconds", ()): 12.5,
        ("ringlog_engine_info", ("id", "degraded", "0.1.0")): 1, ("ringlog_recovery_seconds", ()): 0.75,
        ("ringlog_disk_free_bytes", ()): 1 << 30, ("ringlog_shards", ()): 2, ("ringlog_rings", ()): 3,
        ("ringlog_routers", ()): 9, ("ringlog_router_lag", ()): 10,
        ("ringlog_actor_up", ("wal_shard-00", "wal_shard")): 1,
        ("ringlog_actor_up", ("gateway", "gateway")): 0,
        ("ringlog_actor_restarts_total", ("gateway", "gateway")): 5,
        ("ringlog_actor_busy_ratio", ("wal_shard-00", "wal_shard")): 0.5,
        ("ringlog_actor_heartbeat_age_seconds", ("wal_shard-00", "wal_shard")): 0.25,
        ("ringlog_actor_resident_bytes", ("wal_shard-00", "wal_shard")): 4096,
        ("ringlog_governor_pressure", ("instance",)): 0.9, ("ringlog_governor_step", ("instance",)): 3,
        ("ringlog_ring_fill_ratio", ("instance",)): 0.2, ("ringlog_throttled_total", ("instance",)): 11,
        ("ringlog_governor_waited_seconds_total", ("instance",)): 1.5,
        ("ringlog_delivery_ready", ("2",)): 2, ("ringlog_delivery_standing", ()): 4,
        ("ringlog_watch_sessions", ()): 6, ("ringlog_delivery_grants_total", ()): 8,
        ("ringlog_delivery_lag_seconds", ()): 0.5, ("ringlog_queue_topics", ()): 1,
        ("ringlog_queue_ready", ()): 20, ("ringlog_queue_leases_in_flight", ()): 3,
        ("ringlog_queue_delayed", ()): 4, ("ringlog_queue_claims_waiting", ()): 5,
        ("ringlog_queue_claimed_total", ()): 60, ("ringlog_queue_acked_total", ()): 50,
        ("ringlog_queue_nacked_total", ()): 6, ("ringlog_queue_rejected_total", ()): 2,
        ("ringlog_queue_dead_lettered_total", ()): 1, ("ringlog_groups", ()): 2,
        ("ringlog_group_lag", ()): 30,
        ("ringlog_group_pending", ()): 4, ("ringlog_group_members", ()): 5,
        ("ringlog_group_floor_age_seconds", ()): 6.5,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected


def test_metrics_of_absent_parts_are_omitted() -> None:
    found = sampled(EngineStatusReply("id", "1", "ready", 0.0, "/data", 1, 0, 0, []))
    assert found["ringlog_ready", ()] == 1
    assert not [name for name, _ in found if name.startswith(("ringlog_queue", "ringlog_delivery"))]


def test_an_unreachable_engine_gives_ringlog_up_0_and_no_error() -> None:
    """Prometheus then scrapes a value instead of an error."""

    def away() -> EngineStatusReply:
        raise NotConnected("no engine")

    assert numbers(generate_latest(StatusCollector(away)).decode()) == {("ringlog_up", ()): 0}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)), (":0", ("127.0.0.1", 0)), ("[::1]:1", ("::1", 1)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)  # fmt: skip
def test_valid_addresses_are_parsed(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["9464x", "host:", "host", "host:65536", "host:-1", "host:٣"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        address_of(text)


@pytest.mark.slow
def test_metrics_are_printed_once_or_served_until_an_interrupt(
    shell: Shell, ringlog_engine: Any, ringlog_topic: Any
) -> None:
    """The numbers include the jobs of a queue."""
    ringlog_engine.wait_ready()
    with ringlog.connect(ringlog_engine.url) as client:
        name = ringlog_topic("jobs")
        client.topics.create(name, type="queue")
        queue = client.queue(name)
        queue.put_many([b"1", b"2"])
        queue.claim(1)[0].ack()
    done = shell.run("metrics")
    assert done.returncode == CliExit.DONE
    printed = numbers(done.stdout.decode())
    assert printed["ringlog_up", ()] == 1
    assert printed["ringlog_actor_up", ("wal_shard-00", "wal_shard")] == 1
    served = shell.start("metrics", "--listen", ":0")
    assert served.stdout is not None
    url = json.loads(served.stdout.readline())["metrics"]

    def scraped() -> dict[tuple[str, tuple[str, ...]], float]:
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return numbers(answer.read().decode())

    assert scraped().keys() == printed.keys()
    wait_until(
        lambda: scraped()["ringlog_queue_acked_total", ()] >= 1, 20, "the shard to show what it counts"
    )
    served.send_signal(signal.SIGINT)
    _, err = served.communicate(timeout=30)
    assert (served.returncode, err) == (CliExit.INTERRUPTED, b"")


@pytest.mark.slow
def test_a_missing_engine_and_an_invalid_address_are_errors(shell: Shell, tmp_path: Any) -> None:
    away = Shell(f"ringlog://{tmp_path}").run("metrics")
    assert away.returncode not in {CliExit.DONE, CliExit.INTERRUPTED}
    wrong = shell.run("metrics", "--listen", "nowhere")
    assert wrong.returncode == CliExit.USAGE
    assert b"HOST:PORT" in wrong.stderr
