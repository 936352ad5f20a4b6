"""What `wal.corruption = truncate` makes of a damaged directory: data may be given up, no number comes twice.

Topics are made and written to after such a start, under the old names and a new one. No topic gets an id or
an epoch that was given out before, no record a number that another one had, and what is read is what was
written; a later start without the setting says the same.
"""

from __future__ import annotations

from chaos.rot.answers import start, topic_of
from chaos.rot.specimen import TOPICS, Specimen
from ringlog.errors import CorruptData, RinglogError
from ringlog.testing.shard_world import World

NAMES = (*TOPICS, "gone", "new")
"""Those of the specimen, of one that was deleted, and of one that never was."""
Known = dict[int, tuple[int, dict[int, bytes]]]
"""Topic id -> (head, payloads by number)."""


def after_truncate(specimen: Specimen, files: dict[str, bytes]) -> str:
    """What is wrong once an engine was started with that setting on these files; empty = nothing."""
    sound = start(specimen, specimen.mount())
    known, identities = _known(sound), {s: run.core.directory.last_identity for s, run in sound.runs.items()}
    try:
        world = start(specimen, specimen.mount(files), is_lenient=True)
    except CorruptData:
        return ""  # No word of an operator makes sense of a file that says it is another's.
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
            wrong = f"{name}: id {info.topic_id} or epoch {info.epoch} comes a second time"
        elif info.topic_id in known and written[name] <= known[info.topic_id][0]:
            wrong = f"{name}: number {written[name]} comes a second time"
    before = _known(world)
    world.kill()
    world.is_lenient = False
    try:
        world.start()
    except RinglogError as e:
        return wrong or f"a later start: {e}"
    return wrong or ("" if _known(world) == before else "a later start says something else")


def _known(world: World) -> Known:
    found: Known = {}
    for run in world.runs.values():
        for topic in run.core.directory.by_id.values():
            records = topic_of(world, topic.name).records
            found[topic.topic_id] = topic.head_seq, {record[0]: record[1] for record in records}
    return found


def _strange(known: Known, found: Known) -> str:
    """Records under the numbers of others. A deletion may be among what was given up."""
    for topic_id, (head, written) in known.items():
        records = found[topic_id][1] if topic_id in found else {}
        wrong = [seq for seq, data in records.items() if seq > head or written.get(seq, data) != data]
        if wrong:
            return f"topic {topic_id}: records {wrong[:8]} are not what was written"
    return ""
