"""Steps on a shard and its files, shared by all classes that drive a shard.

A step establishes what it needs. A step that deletes first appends if there is nothing to delete. A step that
moves segments first seals.
"""

from __future__ import annotations

from collections.abc import Callable

from chaos.rigs import storage
from chaos.rigs.harness import BIG, TAG, Harness
from ringlog.envelope import messages as m


def _create(work: Harness) -> None:
    work.put(work.new_topic(), durability="fsync")


def _append(work: Harness) -> None:
    work.append("f", 1)


def _append_many(work: Harness) -> None:
    """Append to both classes. Of the writes of class `disk`, one is followed by a sync and one is not."""
    work.append("d", 2, 2, 2)
    work.send("f", [work.payload(300), work.payload(300)], [work.payload()], [work.payload(700)])
    work.append("d", 1)


def _delete_seq(work: Harness) -> None:
    if len(work.visible("f")) < 3:
        work.append("f", 3)
    chosen = work.visible("f")[1::2]
    work.delete("f", chosen)


def _delete_tag(work: Harness) -> None:
    work.ensure_topic("d")
    if not work.tagged("d").intersection(work.visible("d")):
        work.append("d", 2, 1)
    chosen = work.tagged("d").intersection(work.visible("d"))
    work.delete("d", chosen, m.RecordsDelete("d", 0, TAG, b""))


def _config(work: Harness) -> None:
    """Set a cap that evicts, and then remove it."""
    if len(work.visible("f")) < 2:
        work.append("f", 2)
    visible = work.visible("f")
    cap = len(visible) - 1
    evicted = work.submit_removal("f", visible[:1])
    work.configure("f", cap_records=cap)
    work.grant(evicted)
    work.configure("f")


def _delete_topic(work: Harness) -> None:
    work.ensure_topic("d")
    work.drop("d")


def _rotate(work: Harness) -> None:
    work.append("f", 1, size=BIG)
    work.append("f", 1, size=BIG)


def _seal(work: Harness) -> None:
    if not work.visible("f"):
        work.append("f", 1)
    storage.seal(work.world)


def _relocate(work: Harness) -> None:
    if all(ref.tier == m.TIER_COLD for ref in work.known_segments.values()):
        work.append("f", 2)
        storage.seal(work.world)
    moved = storage.relocate(work.world)
    assert moved.moved, "the relocator has something to do"
    assert not moved.failed, moved


def _reclaim(work: Harness) -> None:
    """Delete all but the last record of `f`, and reclaim the segments that held them."""
    if len(work.visible("f")) < 2:
        work.append("f", 3)
    if not work.known_segments:
        storage.seal(work.world)
    visible = work.visible("f")
    work.delete("f", visible[:-1], m.RecordsDelete("f", visible[-1], None, b""))
    storage.reclaim(work.world)


def _send_again(work: Harness) -> None:
    work.send_again("f")


def _append_disk(work: Harness) -> None:
    work.append("d", 1)


def _append_disk_many(work: Harness) -> None:
    work.append("d", 2, 2, 2)


def _idle(work: Harness) -> None:
    """Wait until records of class `disk` are synced."""
    for _ in range(4):
        work.world.tick(0.15)


def _seal_amid(work: Harness) -> None:
    """Append records between the plan and the rows of a checkpoint, and between the rows and its end."""

    def before(message: m.Message) -> None:
        if isinstance(message, m.CheckpointRows | m.CheckpointDone):
            work.append("d", 1)
            work.append("f", 1)
            work.append("d", 1)

    storage.seal(work.world, before)


def _delete_amid(work: Harness) -> None:
    """Delete records just before the compactor asks which are live. Nothing is synced after the delete."""
    work.append("d", 2, 2)

    def before(message: m.Message) -> None:
        if isinstance(message, m.ListLiveRecords) and work.tagged("d").intersection(work.visible("d")):
            _delete_tag(work)

    storage.seal(work.world, before)


def _evict(work: Harness) -> None:
    """Append one more record to a full topic of class `disk`."""
    if len(work.visible("d")) < 2:
        work.append("d", 1, 1)
    visible = work.visible("d")
    work.configure("d", cap_records=len(visible))
    evicted = work.submit_removal("d", visible[:1], is_eviction=True)
    work.append("d", 1)
    work.grant(evicted)


ALPHABET = (
    "create", "append", "append_many", "delete_seq", "delete_tag", "config", "delete_topic", "rotate", "seal",
    "relocate", "reclaim", "restart",
)  # fmt: skip
"""Twelve operations. All short sequences of them are explored."""
STEPS: dict[str, Callable[[Harness], None]] = {
    "create": _create,
    "append": _append,
    "append_many": _append_many,
    "delete_seq": _delete_seq,
    "delete_tag": _delete_tag,
    "config": _config,
    "delete_topic": _delete_topic,
    "rotate": _rotate,
    "seal": _seal,
    "relocate": _relocate,
    "reclaim": _reclaim,
    "restart": Harness.restart,
    "replace": Harness.replace,
    "send_again": _send_again,
    "append_disk": _append_disk,
    "append_disk_many": _append_disk_many,
    "idle": _idle,
    "seal_amid": _seal_amid,
    "delete_amid": _delete_amid,
    "evict": _evict,
}
