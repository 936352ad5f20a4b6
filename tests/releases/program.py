"""Run an engine, or a program that uses one, with the code of one release.

python program.py engine DIRECTORY          runs until its standard input ends; prints its URL
python program.py use URL TRANSPORT TOPIC   writes, reads and claims; prints the results as JSON
python program.py read URL TOPIC            prints the stored records and counts as JSON

The program uses only functions that both releases have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ringlog
from ringlog.client import EARLIEST
from ringlog.testing import engine

WAIT_S = 30
RECORDS = 2_000


def run_engine(directory: str) -> None:
    settings = {"gateway.enabled": True, "delivery.schedulers": 1, "storage.enabled": True}
    with engine(directory=Path(directory), **settings) as running:
        sys.stdout.write(running.url + "\n")
        sys.stdout.flush()
        sys.stdin.read()


def told(record: Any) -> list[Any]:
    """Return the fields of a record that both releases must agree on, in JSON types."""
    data = None if record.data is None else record.data.decode()
    key = None if record.key is None else record.key.decode()
    headers = {name: value.decode() for name, value in record.headers.items()}
    return [record.seq, data, key, record.tag, record.meta, headers]


def use(url: str, transport: str, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ringlog.connect(url, wait=WAIT_S, transport=transport) as log:
        log.topics.create(topic, durability="fsync", exist_ok=True)
        log.append(topic, b"one", key=b"k", tag="t", meta={"a": 1}, headers={"h": b"v", "": b""})
        log.append_many(topic, [b"two", b""])
        log.append(topic, b"again", dedup_id=f"{topic}-once")
        found["deduped"] = log.append(topic, b"again", dedup_id=f"{topic}-once").deduped
        with log.producer(topic) as producer:
            for n in range(RECORDS):
                producer.send(b"%d" % n, key=b"" if n == 7 else None)
        log.topics.delete_records(topic, match="t")
        with log.watch(topic, start=EARLIEST) as watch:
            found["watched"] = next(iter(watch)).records[0].seq
        found["state"] = log.topics.state(topic).head_seq
        queue_name, dead = topic + "-jobs", topic + "-dead"
        log.topics.create(queue_name, type="queue", max_deliveries=1, dead_letter=dead, leases_durable=True)
        queue = log.queue(queue_name)
        queue.put_many([b"good", b"bad", b"left"])
        good, bad = queue.claim(2, lease_ms=60_000)
        good.ack()
        bad.reject("no")
        (left,) = queue.claim(1)
        left.nack()
        found["jobs"] = [good.data.decode(), bad.data.decode(), left.deliveries]
        group = log.group(topic, "g", mode="queue", max_in_flight=50)
        claimed = group.claim(3)
        found["claimed"] = [job.seq for job in claimed]
        found["skipped"] = list(group.ack(claimed).skipped)
        found["group"] = [group.stats().floor, group.stats().in_flight]
    return found | read(url, topic)


def read(url: str, topic: str) -> dict[str, Any]:
    with ringlog.connect(url, wait=WAIT_S) as log:
        records = [told(record) for record in log.reader(topic)]
        stats = log.queue(topic + "-jobs").stats()
        return {
            "head": records[:4], "records": len(records), "last": records[-1],
            "floor": log.group(topic, "g", mode="queue").stats().floor, "in_flight": stats.in_flight,
        }  # fmt: skip


def main(what: str, *arguments: str) -> None:
    if what == "engine":
        run_engine(*arguments)
        return
    try:
        found = use(*arguments) if what == "use" else read(*arguments)
    except ringlog.errors.RinglogError as e:
        found = {"error": type(e).__name__, "text": str(e)}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
