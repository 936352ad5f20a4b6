"""What is wrong with the history of a queue that was emptied in the end. Pure.

- Nothing is lost: a job that was put has been acked, or lies with the dead letters.
- Nothing comes back: no claim that began after a job's ack had returned was given it.
- Nobody is handed what another one holds: between two hand-outs of a job its lease ended, its holder gave it
  back, or the shard that kept the lease died. Each double is counted under what explains it.
- Nothing is there twice: a job has one number, and one dead letter at most.
- Two workers are told that they finished the same job only if its shard died between their claims.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from chaos.jobs.journal import Did, Outcome, Rows

STORIES_MAX = 5
"""Of each kind of fault so many are told in full."""


@dataclass(frozen=True, slots=True)
class Death:
    """Something was killed between two instants."""

    role: str
    from_ns: int
    to_ns: int
    client: int = 0
    """Which client, for one of those."""

    @property
    def ends_leases(self) -> bool:
        """Leases are memory of a shard."""
        return self.role in {"wal_shard", "all", "supervisor"}


@dataclass(slots=True)
class Judgement:
    """What was counted, and what is wrong."""

    put: int = 0
    """Jobs whose put was answered."""
    done: int = 0
    """Jobs whose ack was answered."""
    dead: int = 0
    doubles: int = 0
    """Hand-outs of a job behind its first."""
    explained: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def says(self, fault: str, story: str) -> None:
        """Something is wrong."""
        self.wrong[fault] += 1
        if self.wrong[fault] <= STORIES_MAX:
            self.stories.append(f"{fault}: {story}")


def judge(
    rows: Rows, deaths: Sequence[Death], lease_ms: int, dead_letters: Mapping[int, int], left: int = 0
) -> Judgement:
    """Judge a history. `dead_letters`: how often each value is there; `left`: jobs that queues still have."""
    found = Judgement(dead=len(dead_letters))
    jobs: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        jobs[int(row["value"])].append(row)
    for value, story in jobs.items():
        _judge_job(value, story, deaths, lease_ms, dead_letters.get(value, 0), found)
        if not left:  # Else it may be one of these.
            _judge_loss(value, story, dead_letters.get(value, 0), found)
    for value in dead_letters.keys() - jobs.keys():
        found.says("a job that nobody put", f"dead letter {value:#x}")
    if left:
        found.says("jobs that nobody gets", f"{left} are left")
    return found


def _judge_job(
    value: int, story: list[Any], deaths: Sequence[Death], lease_ms: int, letters: int, found: Judgement
) -> None:
    name = f"job {value:#x} of queue {story[0]['queue']}"
    put = [row for row in story if row["what"] == Did.PUT]
    answered = [row for row in story if row["what"] == Did.PUT_END and row["outcome"] == Outcome.OK]
    claims = [row for row in story if row["what"] == Did.CLAIMED]
    finished = [row for row in story if row["what"] == Did.END and row["outcome"] == Outcome.OK]
    found.put += len(answered)
    found.done += bool(finished)
    if not put:
        found.says("a job that nobody put", name)
    seqs = {int(row["seq"]) for row in [*answered, *claims]} - {0}
    if len(seqs) > 1:
        found.says("a job is there twice", f"{name} has the numbers {sorted(seqs)}")
    if letters > 1:
        found.says("a dead letter is there twice", f"{name}: {letters} times")
    for claim in claims:
        before = [row for row in finished if row["at_ns"] < claim["begun_ns"] and _is_ack(row, story)]
        if before:
            later_ms = (claim["begun_ns"] - before[0]["at_ns"]) / 1e6
            found.says("a job came back", f"{name} was handed out by a claim {later_ms:.0f} ms after its ack")
    for first, second in pairwise(claims):
        found.doubles += 1
        found.explained[_explain(name, first, second, story, deaths, lease_ms, found)] += 1
    _judge_ends(name, finished, claims, story, deaths, found)


def _judge_loss(value: int, story: list[Any], letters: int, found: Judgement) -> None:
    """Of a queue that is empty."""
    did = Counter(int(row["what"]) for row in story)
    is_put = any(row["what"] == Did.PUT_END and row["outcome"] == Outcome.OK for row in story)
    if is_put and not did[Did.ACK] and not letters:
        found.says(
            "a job is lost", f"{value:#x} was handed out {did[Did.CLAIMED]} times, never acked, and is gone"
        )


def _is_ack(end: Any, story: list[Any]) -> bool:
    """Is this the end of an ack, and not of a reject?"""
    begun = [row for row in story if row["client"] == end["client"] and row["at_ns"] <= end["at_ns"]
             and row["what"] in {Did.ACK, Did.REJECT}]  # fmt: skip
    return bool(begun) and begun[-1]["what"] == Did.ACK


def _explain(
    name: str, first: Any, second: Any, story: list[Any], deaths: Sequence[Death], lease_ms: int,
    found: Judgement,
) -> str:  # fmt: skip
    """Why a job was handed out again. A claim lies somewhere between its beginning and its note: where two
    overlap so, the one that was noted first may have been the later one."""
    why = _why(first, second, story, deaths, lease_ms)
    if not why and second["begun_ns"] <= first["at_ns"]:
        why = _why(second, first, story, deaths, lease_ms)
    if why:
        return why
    after_ms = (second["at_ns"] - first["begun_ns"]) / 1e6
    found.says(
        "two workers have one job",
        f"{name}: client {first['client']}, then client {second['client']} {after_ms:.0f} ms later; "
        + _told(story, int(first["begun_ns"]), deaths),
    )
    return "nothing"


def _why(first: Any, second: Any, story: list[Any], deaths: Sequence[Death], lease_ms: int) -> str:
    gave_back = [
        row for row in story
        if row["what"] in {Did.NACK, Did.REJECT} and row["client"] == first["client"]
        and first["at_ns"] <= row["at_ns"] <= second["at_ns"]
    ]  # fmt: skip
    if gave_back:
        return "given back"
    if second["at_ns"] >= first["begun_ns"] + lease_ms * 1_000_000:
        return "lease ended"
    between = [d for d in deaths if d.to_ns >= first["begun_ns"] and d.from_ns <= second["at_ns"]]
    if any(death.ends_leases for death in between):
        return "shard died"
    if any(death.client == first["client"] for death in between):
        return "worker died"
    return ""


def _told(story: list[Any], from_ns: int, deaths: Sequence[Death]) -> str:
    """All that was said of a job, and who died about that time, in ms from an instant."""
    told = [
        (int(row["at_ns"]), f"client {row['client']} {Did(int(row['what'])).name.lower()}"
         + (f" begun {(int(row['begun_ns']) - from_ns) / 1e6:.0f}" if row["begun_ns"] else "")
         + (f" {Outcome(int(row['outcome'])).name.lower()}" if row["what"] in {Did.END, Did.PUT_END} else ""))
        for row in story
    ]  # fmt: skip
    first, last = min(told)[0], max(told)[0]
    told += [
        (death.to_ns, f"{death.role} {death.client or ''} died") for death in deaths
        if first <= death.to_ns and death.from_ns <= last
    ]  # fmt: skip
    return "; ".join(f"{(at_ns - from_ns) / 1e6:.0f} {what}" for at_ns, what in sorted(told))


def _judge_ends(
    name: str, finished: list[Any], claims: list[Any], story: list[Any], deaths: Sequence[Death],
    found: Judgement,
) -> None:  # fmt: skip
    clients = {int(row["client"]) for row in finished}
    if len(finished) < 2 or not claims:
        return
    # The claim that was noted first need not have been the first; see `_explain`.
    from_ns, to_ns = min(row["begun_ns"] for row in claims), max(row["at_ns"] for row in finished)
    if not any(d.ends_leases and d.to_ns >= from_ns and d.from_ns <= to_ns for d in deaths):
        told = _told(story, int(from_ns), deaths)
        found.says(
            "a job is finished twice", f"{name} by clients {sorted(clients)}, and no shard died; {told}"
        )
