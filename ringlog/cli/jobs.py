"""Queues by hand: `ringlog put`, `claim`, `ack`, `nack`, `extend`, `reject`, `peek`.

A claim outlives its command: the lease is the node's, and whoever names the same node settles the job. So
these commands have a node of their own that stays the same, and a job is named as a claim printed it:
its number, or its number and its lease.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format, RecordPrinter, record_facts
from ringlog.cli.places import parse_milliseconds, parse_moment
from ringlog.errors import RecordTooLarge, UsageError
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    CLAIM_JOBS_MAX,
    JOBS_PER_REQUEST_MAX,
    RECORD_BYTES_DEFAULT,
    RECORD_BYTES_MAX,
)

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.envelope.messages import Message

Given = Annotated[Options, Parameter(parse=False)]
Node = Annotated[str, Parameter(name="--node")]
NODE = "by-hand"
LEASE_PREFIX = "lease_"
SEQ_BYTES = 8
R = TypeVar("R")


def put(
    queue: str,
    *data: str,
    lines: Annotated[bool, Parameter(negative=())] = False,
    key: str | None = None,
    tag: str | None = None,
    ttl: str | None = None,
    not_before: str | None = None,
    priority: int | None = None,
    dedup_id: str | None = None,
    dedup_window: str | None = None,
    options: Given,
) -> None:
    """Add jobs: one for each argument, or what standard input has.

    Parameters
    ----------
    queue
        Which one; it must exist.
    data
        Payloads; without any, standard input is one job.
    lines
        Every line of standard input is a job. Empty lines are passed over.
    key
        Key of each.
    tag
        Tag of each.
    ttl
        Each expires after this long: 10m, 2d.
    not_before
        Not to be worked on before this time (RFC 3339).
    priority
        0 to 255.
    dedup_id
        Of one job: within the queue's window a job is put once under this id, however often it is tried.
    dedup_window
        A shorter window than the queue's: 10s, 5m.
    """
    from ringlog.client.fields import NewRecord

    if dedup_id is not None and (lines or len(data) > 1):
        raise UsageError("--dedup-id goes with one job")
    if lines and data:
        raise UsageError("--lines takes jobs from standard input, not from the command line")
    moment = None if not_before is None else parse_moment(not_before, options.clock)
    ttl_ms = None if ttl is None else parse_milliseconds(ttl)
    key_bytes = None if key is None else key.encode()
    window_ms = None if dedup_window is None else parse_milliseconds(dedup_window)
    count, repeated, first, last = 0, 0, None, 0
    with options.connect() as client:
        jobs = client.queue(queue)
        for part in _parts(_payloads(data, lines=lines)):
            records = [
                NewRecord(data=each, key=key_bytes, tag=tag, ttl_ms=ttl_ms, not_before=moment,
                          priority=priority, dedup_id=dedup_id)
                for each in part
            ]  # fmt: skip
            done = jobs.put_many(records, dedup_window_ms=window_ms)
            first, last = first or done.first_seq, done.last_seq
            count, repeated = count + len(part), repeated + done.deduped
    facts = {"queue": queue, "jobs": count, "first_seq": first, "last_seq": last}
    options.printer().thing(facts if dedup_id is None else {**facts, "deduped": bool(repeated)})


def _payloads(data: Sequence[str], *, lines: bool) -> Iterator[bytes]:
    if data:
        yield from (each.encode() for each in data)
    elif lines:
        from ringlog.cli.write import split_lines

        yield from (line for _, line in split_lines(sys.stdin.buffer, "-"))
    else:
        found = sys.stdin.buffer.read(RECORD_BYTES_MAX + 1)
        if len(found) > RECORD_BYTES_MAX:
            raise RecordTooLarge("standard input is too large for one job", max=RECORD_BYTES_MAX)
        yield found


def _parts(payloads: Iterator[bytes]) -> Iterator[list[bytes]]:
    """As many at once as one write takes."""
    part: list[bytes] = []
    size = 0
    for each in payloads:
        part.append(each)
        size += len(each)
        if len(part) >= BATCH_RECORDS_MAX or size >= RECORD_BYTES_DEFAULT:
            yield part
            part, size = [], 0
    if part:
        yield part


def claim(
    queue: str,
    *,
    count: Annotated[int, Parameter(name=["--count", "-n"])] = 1,
    wait: str = "0",
    lease: str | None = None,
    order: Literal["priority", "seq"] = "priority",
    node: Node = NODE,
    options: Given,
) -> None:
    """Take jobs: each is nobody else's until its lease ends. Prints nothing when there is none.

    Parameters
    ----------
    queue
        Which one.
    count
        Most jobs to take.
    wait
        How long to wait for the first.
    lease
        How long they are held (default: as the queue says). Nothing extends it: see extend.
    order
        Urgent jobs first, where the queue has priorities, or the lowest numbers.
    node
        Who holds them.
    """
    if not 1 <= count <= CLAIM_JOBS_MAX:
        raise UsageError("--count out of range", found=count, max=CLAIM_JOBS_MAX)
    lease_ms = None if lease is None else parse_milliseconds(lease)
    with options.connect() as client:
        jobs = client.queue(queue, node=node, release_on_exit=False).claim(
            count, wait_ms=parse_milliseconds(wait), lease_ms=lease_ms, order=order
        )
    printer = options.printer()
    if printer.format is Format.RAW:
        for job in jobs:
            sys.stdout.buffer.write((job.data or b"") + b"\n")
        return
    printer.rows(
        [
            {
                "job": f"{job.seq}:{job.lease_id}", "deliveries": job.deliveries, "deadline": job.deadline,
                **record_facts(queue, job.record),
            }
            for job in jobs
        ]
    )  # fmt: skip


def ack(queue: str, *jobs: str, node: Node = NODE, options: Given) -> int:
    """Say that jobs are done: they are deleted for good.

    Parameters
    ----------
    queue
        Whose.
    jobs
        Numbers, or number:lease as printed by claim.
    node
        Who holds them.
    """
    from ringlog.envelope.messages import Ack

    return _settle(
        queue, jobs, "acked", options, lambda seqs, tokens: Ack(queue, node, seqs, tokens, call=_call())
    )


def nack(
    queue: str, *jobs: str, delay: str | None = None, reason: str = "", node: Node = NODE, options: Given
) -> int:  # fmt: skip
    """Give jobs back.

    Parameters
    ----------
    queue
        Whose.
    jobs
        Numbers, or number:lease as printed by claim.
    delay
        How long they rest before they are handed out again (default: as the queue says, not at all if it
        says nothing).
    reason
        Why they failed; it goes with them, should they become dead letters.
    node
        Who holds them.
    """
    from ringlog.envelope.messages import Nack

    delay_ms = 0 if delay is None else parse_milliseconds(delay)
    return _settle(
        queue, jobs, "nacked", options,
        lambda seqs, tokens: Nack(
            queue, node, seqs, tokens, delay_ms, _call(), reason, has_backoff=delay is None
        ),
    )  # fmt: skip


def extend(queue: str, *jobs: str, lease: str, node: Node = NODE, options: Given) -> int:
    """Hold jobs for longer, counted from now.

    Parameters
    ----------
    queue
        Whose.
    jobs
        Numbers, or number:lease as printed by claim.
    lease
        For how long.
    node
        Who holds them.
    """
    from ringlog.envelope.messages import Extend

    lease_ms = parse_milliseconds(lease)
    return _settle(
        queue, jobs, "extended", options,
        lambda seqs, tokens: Extend(queue, node, seqs, tokens, lease_ms, call=_call()),
    )  # fmt: skip


def reject(queue: str, *jobs: str, reason: str = "", node: Node = NODE, options: Given) -> int:
    """Send jobs to the dead letters at once.

    Parameters
    ----------
    queue
        Whose.
    jobs
        Numbers, or number:lease as printed by claim.
    reason
        Why; it goes with them.
    node
        Who holds them.
    """
    from ringlog.envelope.messages import Reject

    return _settle(
        queue, jobs, "rejected", options,
        lambda seqs, tokens: Reject(queue, node, seqs, tokens, reason, call=_call()),
    )  # fmt: skip


def peek(queue: str, *, count: Annotated[int, Parameter(name=["--count", "-n"])] = 1, options: Given) -> None:
    """Print the first jobs, whoever holds them; changes nothing.

    Parameters
    ----------
    queue
        Which one.
    count
        How many.
    """
    if count < 1:
        raise UsageError("--count is at least 1", found=count)
    show = RecordPrinter(options.printer())
    with options.connect() as client:
        for record in client.queue(queue).peek(count):
            show.record(queue, record)
    show.close()


# -- settling by number -----------------------------------------------------------------------------------


def _call() -> int:
    from ringlog.client.leases import call_number

    return call_number()


def parse_job(text: str) -> tuple[int, int]:
    """Number and token of `7` or `7:lease_0123456789abcdef`; a token of 0 is none. Raises UsageError."""
    seq, colon, lease = text.partition(":")
    try:
        token = int(lease.removeprefix(LEASE_PREFIX), 16) if colon else 0
        found = int(seq), token
    except ValueError:
        raise UsageError("name a job by its number, or by number:lease", found=text) from None
    if found[0] < 1 or not 0 <= token < 1 << 64 or (colon and not lease.startswith(LEASE_PREFIX)):
        raise UsageError("name a job by its number, or by number:lease", found=text)
    return found


def _settle(
    queue: str, jobs: Sequence[str], word: str, options: Options, message: Callable[[bytes, bytes], Message]
) -> int:
    """Say what becomes of jobs; exit 1 when some were not held."""
    if not jobs:
        raise UsageError("name the jobs")
    named = [parse_job(job) for job in jobs]
    skipped: list[int] = []
    with options.connect() as client:
        for at in range(0, len(named), JOBS_PER_REQUEST_MAX):
            part = named[at : at + JOBS_PER_REQUEST_MAX]
            seqs, tokens = (b"".join(number.to_bytes(SEQ_BYTES, "little") for number in column)
                            for column in zip(*part, strict=True))  # fmt: skip
            reply = _asked(client, message(seqs, tokens))
            skipped += [
                int.from_bytes(reply.skipped[i : i + SEQ_BYTES], "little")
                for i in range(0, len(reply.skipped), SEQ_BYTES)
            ]
    options.printer().thing({"queue": queue, word: len(named) - len(skipped), "not_held": skipped})
    return Exit.FAILED if skipped else Exit.DONE


def _asked(client: Client, message: Message) -> Any:
    from ringlog.link.pending import Steps

    def steps() -> Steps[Any]:
        return (yield client.connection.about_jobs(message)).message

    return client.run(steps())
