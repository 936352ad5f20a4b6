"""Filters by tag levels select the same records in readers, groups, routers and deletes."""

from __future__ import annotations

import pytest

from ringlog.client import NewRecord
from tests.support.engines import client_fixture

pytestmark = pytest.mark.slow

TAGS = ["eu/de/x", "eu/fr/x", "eu/de", "eu", "us/ca/x", "eu/de/x/late", "$eu/de/x", ""]
TABLE = [
    ("eu/+/x", ["eu/de/x", "eu/fr/x"]),
    ("eu/#", ["eu/de/x", "eu/fr/x", "eu/de", "eu", "eu/de/x/late"]),
    ("+/+/x", ["eu/de/x", "eu/fr/x", "us/ca/x"]),
    ("#", [tag for tag in TAGS if tag and not tag.startswith("$")]),
    ("us/de", []),
]

client = client_fixture("ring", "ipc")


@pytest.mark.parametrize(("pattern", "wanted"), TABLE)
def test_readers_groups_routers_and_deletes_agree(client, ringlog_topic, pattern, wanted):
    topic, dest, match = ringlog_topic("tagged"), ringlog_topic("routed"), ("tag", "Levels", pattern)
    router = client.routers.create(f"levels-{abs(hash(dest)):x}", topic, dest, filter=match)
    assert router.filter == match
    client.append_many(topic, [NewRecord(data=b"x", tag=tag or None) for tag in TAGS])
    assert [record.tag for record in client.read(topic, tags=match).records] == wanted

    group = client.group(topic, "g", mode="queue", tags=match)
    assert [job.tag for job in group.claim(100, wait_ms=1_000 if wanted else 0)] == wanted
    (listed,) = client.topics.groups(topic)
    assert (listed.group, listed.tags) == (f"g@~{pattern}", match)

    client.routers.get(router.router, settle_s=20)
    assert [record.tag for record in client.read(dest).records] == wanted

    assert client.topics.delete_records(topic, match=match).deleted == len(wanted)
    left = [tag or None for tag in TAGS if tag not in wanted]
    assert [record.tag for record in client.read(topic).records] == left
