"""`ringlog queue`: show the state of queues and their pending jobs, and purge queues."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import Count, rfc3339
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.topic import facts_of

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]


def stats(*queues: str, options: Given) -> None:
    """Show the number of jobs by state.

    Parameters
    ----------
    queues
        Queue names (default: all queues).

    Examples
    --------
    ringlog queue stats
    ringlog queue stats emails
    """
    with options.connect() as client:
        names = queues or tuple(each.topic for each in client.topics.list() if each.type == "queue")
        rows = []
        for name in names:
            facts = facts_of(client.queue(name).stats())
            rows.append({"queue": facts.pop("topic"), **facts})
    options.printer().rows(rows)


def pending(
    queue: str, *, after: int = 0, count: Count = 100,
    options: Given,
) -> None:  # fmt: skip
    """List claimed jobs that are not done: holder, deadline, last failure.

    Parameters
    ----------
    queue
        Queue name.
    after
        List only jobs with a number above this one.
    count
        Maximum number of jobs.

    Examples
    --------
    ringlog queue pending emails
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
    """Delete all jobs of a queue, leased ones included. This cannot be undone.

    Parameters
    ----------
    queue
        Queue name.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog queue purge emails --yes
    """
    asks = needs_confirmation(yes=yes)
    with options.connect() as client:
        if asks:
            found = client.queue(queue).stats()
            count = found.ready + found.in_flight + found.delayed
            require_confirmation(f"Delete {counted(count, 'job')} of queue {queue}?")
        done = client.queue(queue).purge()
    options.printer().item(facts_of(done))
    return CliExit.DONE
