"""Commands for consumer groups, through the real entry point."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringlog.cli.outcome import CliExit
from ringlog.client import Client, NewRecord
from ringlog.client.group import Group
from ringlog.errors import GroupNotFound
from tests.support.engines import engine_fixture
from tests.support.shell import Shell

pytestmark = pytest.mark.slow

running = engine_fixture("module", wal={"shards": 1})


@pytest.fixture
def topic(client: Client, ringlog_topic: Callable[[str], str]) -> str:
    """A topic with ten records, every second of them with the tag eu.1."""
    name = ringlog_topic("t")
    client.topics.create(name)
    client.append_many(name, [NewRecord(data=b"%d" % n, tag="eu.1" if n % 2 else "us") for n in range(10)])
    return name


@pytest.fixture
def group(client: Client, topic: str) -> Group:
    """A group in which `ann` claimed four records, acked the second and nacked the third."""
    found = client.group(topic, "billing", mode="queue", node="ann")
    jobs = found.claim(4, lease_ms=60_000)
    found.ack([jobs[1]])
    found.nack([jobs[2]])
    return found


def test_groups_are_listed_with_their_positions(
    shell: Shell, client: Client, topic: str, group: Group
) -> None:
    """`group list` works for one topic and for all topics."""
    client.group(topic, "report", tags="eu.*").stats()
    rows = shell.ok("group", "list", topic)
    assert rows == [
        {"topic": topic, "group": "billing", "mode": "queue", "cursor": 5, "floor": 0, "pending": 3},
        {"topic": topic, "group": "report@^eu.", "mode": "stream", "cursor": 1, "floor": 0, "pending": 0},
    ]
    assert [row for row in shell.ok("group", "list") if row["topic"] == topic] == rows
    shell.fails(CliExit.NOT_FOUND, "group", "list", f"{topic}-no")


def test_lag_shows_undelivered_and_pending_records_separately(
    shell: Shell, client: Client, topic: str, group: Group
) -> None:
    """The lag is their sum."""
    client.group(topic, "report").stats()
    queue, stream = shell.ok("group", "lag", topic)
    assert (queue["undelivered"], queue["pending"], queue["lag"]) == (6, 3, 9) == (*group.lag(), 9)
    assert (stream["mode"], stream["undelivered"], stream["lag"]) == ("stream", 10, 10)
    assert {row["group"] for row in shell.ok("group", "lag") if row["topic"] == topic} == {
        "billing", "report",
    }  # fmt: skip


def test_group_show_lists_the_members_and_adds_none(shell: Shell, topic: str, group: Group) -> None:
    (facts,) = shell.ok("group", "show", topic, "billing")
    assert (facts["in_flight"], facts["returned"], facts["undelivered"], facts["lag"]) == (2, 1, 6, 9)
    (member,) = facts["members"]
    assert (member["name"], member["in_flight"]) == ("ann", 2)
    assert member["last_seen"].endswith("Z")
    shell.fails(CliExit.NOT_FOUND, "group", "show", topic, "no-such-group")
    assert len(shell.ok("group", "list", topic)) == 1, "looking makes no group"


def test_pending_records_are_listed_and_filtered(shell: Shell, topic: str, group: Group) -> None:
    """Filters are the node, the idle time and the number of deliveries."""
    rows = shell.ok("group", "pending", topic, "billing")
    assert [(row["first_seq"], row["last_seq"], row["state"], row["node"]) for row in rows] == [
        (1, 1, "leased", "ann"), (3, 3, "returned", ""), (4, 4, "leased", "ann"),
    ]  # fmt: skip
    assert rows[1]["until"] is None
    assert rows[0]["until"] > rows[0]["last_given"] == rows[0]["first_given"]
    of_ann = shell.ok("group", "pending", topic, "billing", "--node", "ann", "-n", "1")
    assert [row["first_seq"] for row in of_ann] == [1]
    assert shell.ok("group", "pending", topic, "billing", "--idle", "1h") == []
    assert shell.ok("group", "pending", topic, "billing", "--deliveries", "2") == []
    shell.fails(CliExit.USAGE, "group", "pending", topic, "billing", "-n", "0")


def test_a_group_seeks_to_a_seq_the_end_and_the_start(shell: Shell, topic: str, group: Group) -> None:
    """A seq is the first record that is delivered next."""
    (moved,) = shell.ok("group", "seek", topic, "billing", "8", "-y")
    assert moved == {"topic": topic, "group": "billing", "first_seq": 8}
    assert [job.seq for job in group.claim(2)] == [8, 9]
    assert shell.ok("group", "seek", topic, "billing", "end", "-y")[0]["first_seq"] == 11
    assert group.lag() == (0, 0)
    assert shell.ok("group", "reset", topic, "billing", "--yes")[0]["first_seq"] == 1
    assert group.lag() == (10, 0)
    shell.fails(CliExit.USAGE, "group", "seek", topic, "billing", "nowhere")
    shell.fails(CliExit.NOT_FOUND, "group", "seek", topic, "other", "1", "-y")


def test_a_group_with_a_filter_is_found_by_the_name_that_list_prints(
    shell: Shell, client: Client, topic: str
) -> None:
    """Groups with different filters are different groups."""
    for tags in ("eu.*", "us"):
        client.group(topic, "report", tags=tags).stats()
    assert [row["group"] for row in shell.ok("group", "list", topic)] == ["report@=us", "report@^eu."]
    assert shell.ok("group", "seek", topic, "report@^eu.", "5", "-y")[0]["first_seq"] == 5
    assert [row["cursor"] for row in shell.ok("group", "list", topic)] == [1, 5]
    shell.fails(CliExit.NOT_FOUND, "group", "show", topic, "report")


def test_a_group_is_deleted(shell: Shell, client: Client, topic: str, group: Group) -> None:
    (done,) = shell.ok("group", "delete", topic, "billing", "-y")
    assert done == {"topic": topic, "group": "billing", "deleted": True}
    again = shell.run("group", "delete", topic, "billing", "-y")
    assert (again.returncode, b'"deleted":false' in again.stdout) == (CliExit.NOT_FOUND, True)
    assert client.topics.groups(topic) == ()
    with pytest.raises(GroupNotFound):
        client.group(topic, "billing", mode="queue", create=False).claim()
    assert client.topics.groups(topic) == (), "who said that it is there makes none"
