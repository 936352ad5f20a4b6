"""`ringlog queue` and `ringlog dead`: how queues stand, emptying them, and jobs that were given up."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.asking import is_confirmed
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.places import rfc3339
from ringlog.cli.topic import facts_of

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]


def stats(*queues: str, options: Given) -> None:
    """How many jobs are in which state.

    Parameters
    ----------
    queues
        Which ones (default: all).
    """
    with options.connect() as client:
        names = queues or tuple(each.topic for each in client.topics.list() if each.type == "queue")
        rows = []
        for name in names:
            facts = facts_of(client.queue(name).stats())
            rows.append({"queue": facts.pop("topic"), **facts})
    options.printer().rows(rows)


def pending(
    queue: str, *, after: int = 0, count: Annotated[int, Parameter(name=["--count", "-n"])] = 100,
    options: Given,
) -> None:  # fmt: skip
    """Print jobs that were handed out and are not done: who holds them, until when, why they failed.

    Parameters
    ----------
    queue
        Whose.
    after
        Those behind this number.
    count
        How many at most.
    """
    with options.connect() as client:
        found = client.queue(queue).pending(count, after=after)
    rows = []
    for each in found:
        facts = facts_of(each)
        facts["until"], facts["failed_at"] = _moment(each.until), _moment(each.failed_at)
        rows.append(facts)
    options.printer().rows(rows)


def _moment(seconds: float) -> str | None:
    return rfc3339(round(seconds * 1e6)) if seconds else None


def purge(queue: str, *, yes: Yes = False, options: Given) -> int:
    """Delete every job that is there now, whoever holds it, for good. On a terminal it asks first.

    Parameters
    ----------
    queue
        Which one.
    yes
        Do not ask.
    """
    if not yes and not is_confirmed(f"Delete all jobs of {queue} for good?"):
        return Exit.USAGE
    with options.connect() as client:
        done = client.queue(queue).purge()
    options.printer().thing(facts_of(done))
    return Exit.DONE
