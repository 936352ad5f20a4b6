"""Topics with older segments in the cold tier, a directory or a bucket, are read like all others.

One topic is in all places at the same time: old segments are cold, the newest is hot, and the rest is in the
log.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pytest

import ringlog
from ringlog.errors import NotReady, TopicNotFound
from ringlog.spark.batch import BatchReader
from ringlog.spark.clients import close_clients
from ringlog.spark.errors import OptionError
from ringlog.spark.options import source_options
from ringlog.spark.plan import COLD, HOT, WAL
from ringlog.spark.schema import arrow_schema, record_schema
from ringlog.spark.views import ViewReader, view_schema
from ringlog.testing.real_engine import engine, wait_until
from tests.support.buckets import bucket
from tests.support.checkpoints import checkpoint
from tests.support.spark_query import Query
from tests.support.spark_records import copied, reader_of, rows_of, seqs, table, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PARTS, EACH, TAIL = 4, 2_000, 70
N = PARTS * EACH + TAIL
MOVE_S = 60


@pytest.fixture(scope="module", params=["directory", "bucket"])
def tiered(request, tmp_path_factory):
    """An engine with the topic `t` in all tiers."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        environ, place = {}, {"url": "s3://cold/prefix"}
        if request.param == "directory":
            directory = tmp_path_factory.mktemp("cold")
            directory.chmod(0o700)
            place = {"dir": str(directory)}
        else:
            environ = stack.enter_context(bucket())
        running = stack.enter_context(
            engine(
                wal={"shards": 1}, storage={"enabled": True, "own_segment_bytes": "1KiB"},
                cold={"hot_segments": 1, "interval_s": 0.1, **place}, environ=environ,
            )
        )  # fmt: skip
        client = stack.enter_context(ringlog.connect(running.url, wait=10))
        for part in range(PARTS):
            write(client, "t", part * EACH + 1, (part + 1) * EACH, size=50)
            checkpoint(running)
            # Only the newest segment stays on the host.
            wait_until(lambda: hot_parts(running) == 1, MOVE_S, "older segments are moved")
        write(client, "t", N - TAIL + 1, N, frame=7, size=50)
        running.cold = place.get("dir") or place["url"]
        for name, value in environ.items():
            patched.setenv(name, value)
        yield running
        close_clients()


def hot_parts(running):
    return sum(1 for _ in Path(running.data_dir).rglob("*.data"))


def test_a_batch_reads_all_tiers_as_one_topic(tiered):
    reader, _ = reader_of(tiered, "t", maxPartitionBytes="100k")
    tiers = [{each.tier for each in part.slices} for part in reader.partitions()]
    assert set.union(*tiers) == {COLD, HOT, WAL}
    assert not any(COLD in each and len(each) > 1 for each in tiers), "what is cold is read by itself"
    found = table(tiered, "t")
    assert found["seq"].to_pylist() == list(range(1, N + 1))
    assert found["payload"].to_pylist() == [b"%d" % n + b"." * 50 for n in range(1, N + 1)]


def test_bounds_and_tags_apply_to_the_cold_tier(tiered):
    bounds = {"startingOffsets": '{"t": 1500}', "endingOffsets": '{"t": 4500}'}
    assert seqs(tiered, "t", **bounds) == list(range(1500, 4500))
    assert seqs(tiered, "t", tags="t3") == [n for n in range(1, N + 1) if n % 10 == 3 and n % 7]


def test_a_stream_starts_in_the_cold_tier(tiered):
    query = Query(tiered, "t", now=True, maxOffsetsPerTrigger="1500")
    assert len(query.drain()) > PARTS
    assert query.seqs("t") == list(range(1, N + 1))


@pytest.mark.parametrize("view", ["frames", "audit"])
def test_views_list_every_frame_of_every_tier(tiered, view):
    found = sorted(rows_of(tiered, view, ["t"]), key=lambda row: row["first_seq"])
    assert {row["tier"] for row in found} == {"cold", "hot", "log"}
    ends = [0, *(row["last_seq"] for row in found)]
    assert [row["first_seq"] for row in found] == [end + 1 for end in ends[:-1]]
    assert ends[-1] == N
    assert all(row.get("fault") is None for row in found)


MOVED = (PARTS - 1) * EACH
"""Number of records that were relocated."""


def alone(tiered, **options):
    """Read the cold tier without its engine."""
    given = {"cold": tiered.cold, "path": tiered.data_dir, "subscribe": "t", **options}
    parsed = source_options(given, streaming=False)
    reader = copied(BatchReader(parsed, record_schema(parsed)))
    batches = [batch for part in reader.partitions() for batch in copied(reader).read(copied(part))]
    return pa.Table.from_batches(batches, schema=arrow_schema(record_schema(parsed)))


def test_the_cold_tier_is_read_without_an_engine(tiered):
    """The option `cold` uses the snapshots of a data directory. The read ends at the last relocated
    record."""
    found = alone(tiered, maxPartitionBytes="100k")
    assert found["seq"].to_pylist() == list(range(1, MOVED + 1))
    assert found["payload"].to_pylist() == [b"%d" % n + b"." * 50 for n in range(1, MOVED + 1)]
    bounds = {"startingOffsets": '{"t": 1500}', "endingOffsets": '{"t": 4500}'}
    assert alone(tiered, **bounds)["seq"].to_pylist() == list(range(1500, 4500))
    tagged = [n for n in range(1, MOVED + 1) if n % 10 == 3 and n % 7]
    assert alone(tiered, tags="t3")["seq"].to_pylist() == tagged
    at = found["ts"][3_000].as_py().isoformat()
    later = alone(tiered, startingTimestamp=at)["seq"].to_pylist()
    assert later[-1] == MOVED
    assert later == list(range(later[0], MOVED + 1))
    assert later[0] <= 3_001


def test_a_checkpoint_works_for_the_cold_tier_and_for_the_log(tiered):
    """The offsets belong to the same log."""
    query = Query(tiered, "t", now=True, cold=tiered.cold, maxOffsetsPerTrigger="1500")
    query.drain()
    assert query.seqs("t") == list(range(1, MOVED + 1))
    del query.given["cold"]
    query.restart(now=True).drain()
    assert query.seqs("t") == list(range(1, N + 1))


def test_an_invalid_cold_tier_is_refused(tiered, tmp_path):
    with pytest.raises(OptionError, match="no snapshot"):
        alone(tiered, path=str(tmp_path))
    with pytest.raises(OptionError, match="not the cold tier of an engine"):
        alone(tiered, cold=str(tmp_path))
    with pytest.raises(NotReady, match="is not available"):
        alone(tiered, cold=str(tmp_path / "absent"))
    with pytest.raises(TopicNotFound):
        alone(tiered, subscribe="u")


def test_the_cold_tier_without_an_engine_has_a_gaps_view(tiered):
    raw = {"cold": tiered.cold, "path": tiered.data_dir, "subscribe": "t", "view": "gaps"}
    reader = ViewReader(source_options(raw, streaming=False), view_schema("gaps"))
    assert [row for part in reader.partitions() for row in reader.read(part)] == []
    with pytest.raises(OptionError, match="needs the engine"):
        source_options(raw | {"onCorrupt": "quarantine"}, streaming=False)


def test_deletes_hide_cold_records(tiered):
    """This test runs last, because it changes the data. Without the engine, a delete is visible after the
    next snapshot."""
    with ringlog.connect(tiered.url, wait=10) as client:
        client.topics.delete_records("t", match="t4")
    expected = [n for n in range(1, N + 1) if n % 10 != 4 or not n % 7]
    assert seqs(tiered, "t") == expected
    assert alone(tiered)["seq"].to_pylist() == list(range(1, MOVED + 1))
    checkpoint(tiered)
    wait_until(lambda: hot_parts(tiered) == 1, MOVE_S, "the tail's predecessor is moved")
    assert alone(tiered)["seq"].to_pylist() == [n for n in expected if n <= MOVED + EACH]
