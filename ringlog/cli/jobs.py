"""`ringlog put`, `claim`, `ack`, `nack`, `extend`, `reject`, `peek`: work on the jobs of a queue.

A lease outlives the claim command: it belongs to the node, and any command with the same node name can settle
the job. So these commands use a fixed node name by default. A job is identified as `claim` prints it: by its
number, or by number and lease.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from ringlog.cli.option_parsing import (
    AnyBytes,
    Count,
    parse_milliseconds,
    parse_moment,
    parse_seq,
    within,
)
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit, partly_applied
from ringlog.cli.output import Format, RecordPrinter, record_facts
from ringlog.errors import RecordTooLarge, RinglogError, UsageError
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    CLAIM_JOBS_MAX,
    JOBS_PER_REQUEST_MAX,
    PRIORITY_LEVELS_MAX,
    RECORD_BYTES_DEFAULT,
    RECORD_BYTES_MAX,
)

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.envelope.messages import Message

Given = Annotated[Options, Parameter(parse=False)]
Node = Annotated[str, Parameter(name="--node")]
NODE = "by-hand"
_LEASE = re.compile(r"lease_([0-9a-fA-F]{1,16})")
SEQ_BYTES = 8
R = TypeVar("R")


def put(
    queue: str,
    *data: AnyBytes,
    lines: Annotated[bool, Parameter(negative=())] = False,
    key: AnyBytes | None = None,
    tag: str | None = None,
    ttl: str | None = None,
    not_before: str | None = None,
    priority: Annotated[int | None, Parameter(validator=within(0, PRIORITY_LEVELS_MAX - 1))] = None,
    dedup_id: str | None = None,
    dedup_window: str | None = None,
    options: Given,
) -> None:
    """Add jobs to a queue.

    Parameters
    ----------
    queue
        Queue name; the queue must exist.
    data
        Payloads, one per job (default: all of standard input as one job).
    lines
        Add each line of standard input as one job. Empty lines are skipped.
    key
        Key of each job.
    tag
        Tag of each job.
    ttl
        Expire each job after this time: 10m, 2d.
    not_before
        Earliest time at which the jobs may be claimed (RFC 3339).
    priority
        Priority from 0 to 255.
    dedup_id
        Deduplication id; requires exactly one job. Repeated commands within the queue's deduplication window
        add the job only once.
    dedup_window
        Deduplication window, if shorter than the queue's: 10s, 5m.

    Examples
    --------
    ringlog put emails '{"to": "ann@example.org"}'
    ringlog put emails hello --dedup-id welcome-ann
    """
    from ringlog.client.write.fields import NewRecord

    if dedup_id is not None and (lines or len(data) > 1):
        raise UsageError("--dedup-id needs exactly one job")
    if lines and data:
        raise UsageError("--lines takes jobs from standard input, not from the command line")
    moment = None if not_before is None else parse_moment(not_before, options.clock, "--not-before")
    ttl_ms = None if ttl is None else parse_milliseconds(ttl, "--ttl")
    window_ms = None if dedup_window is None else parse_milliseconds(dedup_window, "--dedup-window")
    count, repeated, first, last = 0, 0, None, 0
    with options.connect() as client:
        jobs = client.queue(queue)
        try:
            for part in _parts(_payloads(data, lines=lines)):
                records = [
                    NewRecord(data=each, key=key, tag=tag, ttl_ms=ttl_ms, not_before=moment,
                              priority=priority, dedup_id=dedup_id)
                    for each in part
                ]  # fmt: skip
                done = jobs.put_many(records, dedup_window_ms=window_ms)
                first, last = first or done.first_seq, done.last_seq
                count, repeated = count + len(part), repeated + done.deduped
        except (RinglogError, OSError) as e:
            raise partly_applied(e, count) from None
    facts = {"queue": queue, "jobs": count, "first_seq": first, "last_seq": last}
    options.printer().item(facts if dedup_id is None else {**facts, "deduped": bool(repeated)})


def _payloads(data: Sequence[bytes], *, lines: bool) -> Iterator[bytes]:
    if data:
        yield from data
    elif lines:
        from ringlog.cli.write import split_lines

        yield from (line for _, line in split_lines(sys.stdin.buffer, "-"))
    else:
        found = sys.stdin.buffer.read(RECORD_BYTES_MAX + 1)
        if len(found) > RECORD_BYTES_MAX:
            raise RecordTooLarge("standard input is too large for one job", max=RECORD_BYTES_MAX)
        yield found


def _parts(payloads: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Split the payloads into lists that one write accepts."""
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
    count: Annotated[int, Parameter(name=["--count", "-n"], validator=within(1, CLAIM_JOBS_MAX))] = 1,
    wait: str = "0",
    lease: str | None = None,
    order: Literal["priority", "seq"] = "priority",
    node: Node = NODE,
    options: Given,
) -> None:
    """Lease jobs exclusively until their lease expires.

    Prints nothing if no job is ready.

    Parameters
    ----------
    queue
        Queue name.
    count
        Maximum number of jobs.
    wait
        Time to wait for the first job: 5s, 500ms.
    lease
        Lease duration (default: that of the queue). The lease is not extended automatically: see
        `ringlog extend`.
    order
        Order of jobs: by priority, if the queue has priorities, or by number.
    node
        Node that holds the leases.

    Examples
    --------
    ringlog claim emails --count 2 --wait 5s --lease 10m
    """
    lease_ms = None if lease is None else parse_milliseconds(lease, "--lease")
    with options.connect() as client:
        jobs = client.queue(queue, node=node, release_on_exit=False).claim(
            count, wait_ms=parse_milliseconds(wait, "--wait"), lease_ms=lease_ms, order=order
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
    """Acknowledge jobs: delete them from the queue. This cannot be undone.

    Parameters
    ----------
    queue
        Queue name.
    jobs
        Jobs, each as its number, or as number:lease as `ringlog claim` prints it.
    node
        Node that holds the leases.

    Examples
    --------
    ringlog ack emails 17:lease_0000030000000012 18
    """
    from ringlog.envelope.messages import Ack

    return _settle(
        queue, jobs, "acked", options, lambda seqs, tokens: Ack(queue, node, seqs, tokens, call=_call())
    )


def nack(
    queue: str, *jobs: str, delay: str | None = None, reason: str = "", node: Node = NODE, options: Given
) -> int:  # fmt: skip
    """Return jobs to the queue.

    Parameters
    ----------
    queue
        Queue name.
    jobs
        Jobs, each as its number, or as number:lease as `ringlog claim` prints it.
    delay
        Time before the jobs are ready again (default: the back-off of the queue).
    reason
        Reason of the failure, kept if the job becomes a dead letter.
    node
        Node that holds the leases.

    Examples
    --------
    ringlog nack emails 19 --delay 1m --reason 'mail server is down'
    """
    from ringlog.envelope.messages import Nack

    delay_ms = 0 if delay is None else parse_milliseconds(delay, "--delay")
    return _settle(
        queue, jobs, "nacked", options,
        lambda seqs, tokens: Nack(
            queue, node, seqs, tokens, delay_ms, _call(), reason, has_backoff=delay is None
        ),
    )  # fmt: skip


def extend(queue: str, *jobs: str, lease: str, node: Node = NODE, options: Given) -> int:
    """Extend the leases of jobs, counted from now.

    Parameters
    ----------
    queue
        Queue name.
    jobs
        Jobs, each as its number, or as number:lease as `ringlog claim` prints it.
    lease
        New lease duration, counted from now: 10m, 1h.
    node
        Node that holds the leases.

    Examples
    --------
    ringlog extend emails 20 --lease 1h
    """
    from ringlog.envelope.messages import Extend

    lease_ms = parse_milliseconds(lease, "--lease")
    return _settle(
        queue, jobs, "extended", options,
        lambda seqs, tokens: Extend(queue, node, seqs, tokens, lease_ms, call=_call()),
    )  # fmt: skip


def reject(queue: str, *jobs: str, reason: str = "", node: Node = NODE, options: Given) -> int:
    """Move jobs to the dead letters immediately.

    Parameters
    ----------
    queue
        Queue name.
    jobs
        Jobs, each as its number, or as number:lease as `ringlog claim` prints it.
    reason
        Reason, kept in the dead letter.
    node
        Node that holds the leases.

    Examples
    --------
    ringlog reject emails 21 --reason 'no address'
    """
    from ringlog.envelope.messages import Reject

    return _settle(
        queue, jobs, "rejected", options,
        lambda seqs, tokens: Reject(queue, node, seqs, tokens, reason, call=_call()),
    )  # fmt: skip


def peek(queue: str, *, count: Count = 1, options: Given) -> None:
    """Print the first jobs of a queue without claiming them.

    Leased jobs are printed as well.

    Parameters
    ----------
    queue
        Queue name.
    count
        Maximum number of jobs.

    Examples
    --------
    ringlog peek emails --count 5
    """
    with options.connect() as client, RecordPrinter(options.printer()) as show:
        for record in client.queue(queue).peek(count):
            show.record(queue, record)


# -- settling by number -----------------------------------------------------------------------------------


def _call() -> int:
    from ringlog.client.leases.lease_extender import new_call_number

    return new_call_number()


def parse_job(text: str) -> tuple[int, int]:
    """Parse `7` or `7:lease_0123456789abcdef` to (seq, lease token); token 0: none. Raise UsageError."""
    seq, colon, lease = text.partition(":")
    found, token = parse_seq(seq), _LEASE.fullmatch(lease)
    if not found or bool(colon) != bool(token):
        raise UsageError(f"a job must be a number from 1, or number:lease, got {text!r}")
    return found, int(token[1], 16) if token else 0


def _settle(
    queue: str, jobs: Sequence[str], word: str, options: Options, message: Callable[[bytes, bytes], Message]
) -> int:
    """Settle or extend jobs; return exit code 1 if some leases were not held by the node."""
    if not jobs:
        raise UsageError("give the jobs: each a number, or number:lease")
    named = [parse_job(job) for job in jobs]
    skipped: list[int] = []
    with options.connect() as client:
        for at in range(0, len(named), JOBS_PER_REQUEST_MAX):
            part = named[at : at + JOBS_PER_REQUEST_MAX]
            seqs, tokens = (b"".join(number.to_bytes(SEQ_BYTES, "little") for number in column)
                            for column in zip(*part, strict=True))  # fmt: skip
            reply = _request(client, message(seqs, tokens))
            skipped += [
                int.from_bytes(reply.skipped[i : i + SEQ_BYTES], "little")
                for i in range(0, len(reply.skipped), SEQ_BYTES)
            ]
    options.printer().item({"queue": queue, word: len(named) - len(skipped), "not_held": skipped})
    return CliExit.FAILED if skipped else CliExit.DONE


def _request(client: Client, message: Message) -> Any:
    from ringlog.link.futures import Steps

    def steps() -> Steps[Any]:
        return (yield client.connection.request_jobs(message)).message

    return client.run(steps())
