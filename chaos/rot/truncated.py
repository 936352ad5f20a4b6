"""A start with `wal.corruption = truncate` on a damaged directory: data may be lost, but no number is reused.

After the start, topics are created and written under old names and a new one. No topic may get an id or epoch
that was assigned before, and no record the seq of another record. Reads must return the written data. A later
start without the setting must give the same state.
"""

from __future__ import annotations

from chaos.rot.answers import start, topic_of
from chaos.rot.specimen import TOPICS, Specimen
from ringlog.errors import CorruptData, RinglogError
from tests.support.shard_world import World

NAMES = (*TOPICS, "gone", "new")
"""Topics of the specimen, a deleted topic, and a new one."""
Known = dict[int, tuple[int, dict[int, bytes]]]
"""Topic id -> (head, payload by seq)."""


def after_truncate(specimen: Specimen, files: dict[str, bytes]) -> str:
    """Start an engine with this setting on these files; describe the problem, or return an empty string."""
    sound = start(specimen, specimen.mount())
    known, identities = _known(sound), {s: run.core.directory.last_identity for s, run in sound.runs.items()}
    try:
        world = start(specimen, specimen.mount(files), is_lenient=True)
    except CorruptData:
        return ""  # The setting does not permit using a file that belongs to another place.
    wrong = _strange(known, _known(world))
    written: dict[str, int] = {}
    for name in NAMES:
        if wrong:
            return wrong
        try:
            info = world.put_topic(name, durability="fsync")
            written[name] = world.append(name, [b"after"], producer=99)
        except RinglogError as e:
            if "halted" in str(e):
                continue
            return f"{name}: {e}"
        used_id, used_epoch = identities[info.shard]
        if info.topic_id not in known and (info.topic_id <= used_id or info.epoch <= used_epoch):
            wrong = f"{name}: topic id {info.topic_id} or epoch {info.epoch} is reused"
        elif info.topic_id in known and written[name] <= known[info.topic_id][0]:
            wrong = f"{name}: seq {written[name]} is reused"
    before = _known(world)
    world.kill()
    world.is_lenient = False
    try:
        world.start()
    except RinglogError as e:
        return wrong or f"a later start: {e}"
    return wrong or ("" if _known(world) == before else "a later start without truncate gives another state")


def _known(world: World) -> Known:
    found: Known = {}
    for run in world.runs.values():
        for topic in run.core.directory.by_id.values():
            records = topic_of(world, topic.name).records
            found[topic.topic_id] = topic.head_seq, {record[0]: record[1] for record in records}
    return found


def _strange(known: Known, found: Known) -> str:
    """Describe wrong records under known seqs, or return an empty string.

    A truncation may lose deletes, so deleted records may return.
    """
    for topic_id, (head, written) in known.items():
        records = found[topic_id][1] if topic_id in found else {}
        wrong = [seq for seq, data in records.items() if seq > head or written.get(seq, data) != data]
        if wrong:
            return f"topic {topic_id}: records {wrong[:8]} are not what was written"
    return ""
