"""Compare the recovered topics with the model, and run the offline verifier.

Checks: acked records survive. No record is invented. No gap is silent. No seq is used twice. Deleted records
do not return. A frame survives whole or not at all. A record of class `fsync` that a reader saw stays,
because a consumer may have acted on it (RF-42).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chaos.rigs.model import Model, SentFrame
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from tests.support.shard_world import World


@dataclass(frozen=True, slots=True)
class CrashKind:
    """Kind of a crash."""

    name: str
    is_power_loss: bool = False
    keeps_board: bool = False
    """A successor finds the same board."""
    is_lie: bool = False
    """The disk reported syncs that it did not perform. Records may be missing, but those that exist must be
    whole and must have been sent."""


KILL = CrashKind("kill of the engine")
KILL_SHARD = CrashKind("kill of the shard", keeps_board=True)
POWER_LOSS = CrashKind("power loss", is_power_loss=True)


class Seen(NamedTuple):
    """Everything that a client can observe of a topic."""

    topic_id: int
    epoch: int
    head: int
    earliest: int
    live: int
    live_bytes: int
    last_write_ts: int | None
    config: Any
    """None if the configuration was not requested."""
    lost: list[tuple[int, int]]
    records: dict[int, bytes]


def observe(world: World, shard: int = 0) -> dict[str, Seen]:
    """Return what clients observe of every topic of a shard, by name."""
    found = {}
    run = world.runs[shard]
    for topic in run.core.directory.by_id.values():
        state = world.ask(run, m.TopicState(topic.name, touch=False))
        assert isinstance(state, m.TopicStateReply), state
        found[topic.name] = Seen(
            state.topic_id, state.epoch, state.head_seq, state.earliest_seq, state.count, state.bytes,
            state.last_write_ts, state.config, list(topic.lost), dict(world.records(topic.name)),
        )  # fmt: skip
    return found


def require_same(before: Mapping[str, Seen], after: Mapping[str, Seen], what: str) -> None:
    """Raise GuaranteeBroken with `what` unless clients observe the same."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise GuaranteeBroken(
                f"{what}: {name}: {str(before.get(name))[:600]} then {str(after.get(name))[:600]}"
            )


def check(model: Model, seen: Mapping[str, Seen], how: CrashKind) -> None:
    """Compare the observed state after an end with the requests and replies before it.

    Raises GuaranteeBroken.
    """
    names = model.topics
    for name in names:
        topic, may = seen.get(name), model.may_exist(name)
        if (topic is not None) not in may:
            raise GuaranteeBroken(f"topic {name}: exists is {topic is not None}, may be {may}")
        if topic is None:
            continue
        ttl_ms = topic.config.get("ttl_ms", 0) if topic.config is not None else None
        if ttl_ms is not None and ttl_ms not in model.may_have_ttl(name):
            raise GuaranteeBroken(f"topic {name}: ttl_ms {ttl_ms} of {model.may_have_ttl(name)}")
        _check_topic(name, topic, model, how)
    if strangers := sorted(seen.keys() - set(names)):
        raise GuaranteeBroken(f"topics {strangers} were never requested")


def _check_topic(name: str, topic: Seen, model: Model, how: CrashKind) -> None:
    found, mine = dict(topic.records), [each for each in model.frames if each.topic == name]
    mine = [each for each in mine if each.topic_id == topic.topic_id]
    must_go, may_go = model.gone(topic.topic_id, is_power_loss=how.is_power_loss)
    if back := sorted(must_go.intersection(found)):
        raise GuaranteeBroken(f"topic {name}: deleted records {back} are there again after a {how.name}")
    by_payload = {payload: seq for seq, payload in found.items()}
    if len(by_payload) != len(found):
        raise GuaranteeBroken(f"topic {name}: a record is stored twice")
    last = 0
    for frame in mine:
        first_seq = place(frame, by_payload)
        expected = dict(enumerate(frame.payloads, first_seq)) if first_seq else {}
        there = {seq: found.pop(seq) for seq in expected if seq in found}
        missing = expected.keys() - there.keys() - must_go - may_go
        if any(expected[seq] != payload for seq, payload in there.items()) or (there and missing):
            raise GuaranteeBroken(f"topic {name}: {frame} came back as {there}")
        if there:
            if frame.is_refused:
                raise GuaranteeBroken(f"topic {name}: {frame} was refused but stored")
            if first_seq <= last:
                raise GuaranteeBroken(
                    f"topic {name}: {frame} lies before one that was sent earlier, at {last}"
                )
            last = first_seq
        if missing and frame.is_owed:
            _check_missing(name, topic, frame, sorted(missing), how)
    if found:
        raise GuaranteeBroken(
            f"topic {name}: records {sorted(found)} were never sent, or are not as they were sent"
        )
    if how.is_lie:
        return
    if topic.lost and mine and mine[0].is_fsync:
        raise GuaranteeBroken(f"topic {name}: {topic.lost} announced as lost")
    _check_removals(name, topic, model, mine)
    if topic.live != len(topic.records):
        raise GuaranteeBroken(
            f"topic {name}: says it has {topic.live} records, and there are {len(topic.records)}"
        )


def _check_missing(name: str, topic: Seen, frame: SentFrame, missing: list[int], how: CrashKind) -> None:
    said = "acked" if frame.acked_at else "shown"
    if frame.is_fsync or not how.is_power_loss:
        raise GuaranteeBroken(f"topic {name}: {said} records {missing} are gone after a {how.name}")
    if not all(any(a <= seq <= b for a, b in topic.lost) for seq in missing):
        raise GuaranteeBroken(
            f"topic {name}: {said} records {missing} are gone and {topic.lost} is announced"
        )


def _check_removals(name: str, topic: Seen, model: Model, mine: list[SentFrame]) -> None:
    """Check that a removal takes all of its surviving records or none."""
    removals = [each for each in model.removals if each.topic_id == topic.topic_id]
    survived = {seq for sent in mine if sent.first_seq for seq in sent.seqs if seq <= topic.head}
    survived -= {seq for seq in survived if any(a <= seq <= b for a, b in topic.lost)}
    for each in removals:
        others = set().union(*(other.seqs for other in removals if other is not each))
        left = (each.seqs & survived) - others
        there = left.intersection(topic.records)
        if there and there != left:
            raise GuaranteeBroken(
                f"topic {name}: of records {sorted(left)}, removed at once, {sorted(there)} are there"
            )


def place(frame: SentFrame, by_payload: Mapping[bytes, int]) -> int:
    """Return the first seq of a frame, as acked or as found; 0 if it was neither acked nor found."""
    if frame.first_seq:
        return frame.first_seq
    for i, payload in enumerate(frame.payloads):
        if payload in by_payload:
            return by_payload[payload] - i
    return 0


def note_seen(model: Model, seen: Mapping[str, Seen]) -> None:
    """Record in the model what a reader saw after a start. Call it after a successful `check`."""
    by_payload = {
        name: {payload: seq for seq, payload in topic.records.items()} for name, topic in seen.items()
    }
    gone = {
        topic.topic_id: set().union(*model.gone(topic.topic_id, is_power_loss=False))
        for topic in seen.values()
    }
    for frame in model.frames:
        topic = seen.get(frame.topic)
        if topic is None or frame.topic_id != topic.topic_id:
            continue
        first_seq = place(frame, by_payload[frame.topic])
        numbered = enumerate(frame.payloads, first_seq)
        rest = [payload for seq, payload in numbered if seq not in gone[frame.topic_id]]
        if first_seq and rest and all(payload in by_payload[frame.topic] for payload in rest):
            model.mark_seen(frame, first_seq)
        elif first_seq and rest:
            model.mark_lost(frame)


def write_files(files: Mapping[str, bytes], root: Path) -> None:
    """Write the files of a simulated disk below a directory of the host, where the verifier can read them."""
    for path, data in files.items():
        real = root / path[1:]
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(data)
