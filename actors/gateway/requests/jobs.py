"""Claims for clients that cannot read the files: leases from the shard, with the jobs' frames. Pure.

Jobs that do not fit into one reply, or cannot be read, are returned at once for other workers. If no job can
be read, the reply is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import msgspec
import numpy as np

from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import GatewayRequest
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import NotReady, RinglogError
from ringlog.limits import CLAIM_SLICE_MS_MAX, READ_BYTES_MAX, READ_LIMIT_MAX
from ringlog.topic.tombstone import ReadPlan

ClaimedRun = tuple[int, int, int, int]
ClaimOrSteal = m.Claim | m.Steal
ReadFrames = Callable[[m.Read, m.Located, ReadPlan], Generator[Any, Any, ev.FramesRead]]
Locate = Callable[[m.Read], Generator[Any, Any, m.Located]]
_READS_PER_RUN_MAX = 16
"""Most reads per run for one reply. Jobs that are not read then are returned."""


class JobFlows:
    """Flows of requests about jobs."""

    def __init__(self, ask_owner: Callable[[Any], Flow], locate: Locate, read_frames: ReadFrames) -> None:
        self._ask_owner, self._locate, self._read_frames = ask_owner, locate, read_frames

    def claim(self, request: GatewayRequest) -> Flow:
        """Claim jobs and read them.

        The wait is limited to CLAIM_SLICE_MS_MAX; the client repeats the claim. If the key was revoked
        meanwhile, the jobs are returned.
        """
        message: ClaimOrSteal = request.message
        if not isinstance(message, m.Steal):
            wait_ms = min(message.wait_ms, CLAIM_SLICE_MS_MAX)
            message = msgspec.structs.replace(message, wait_ms=wait_ms)
        # A remote client may reconnect through another connection, so its process is not monitored.
        message = msgspec.structs.replace(message, pid=0, pid_started=0)
        claimed, _ = yield from self._ask_owner(message)
        assert isinstance(claimed, m.ClaimReply)
        if not claimed.runs:
            return claimed, None
        if request.refusal is not None:
            yield from self._return_leases(message, claimed.runs, 0, undo=True)
            raise request.refusal
        if claimed.payloads or claimed.frames:  # The shard had the jobs in memory.
            return msgspec.structs.replace(claimed, data=b""), claimed.data or None
        parts: list[bytes] = []
        frames, reached, error = 0, 0, None
        try:
            frames, reached = yield from self._read(claimed, parts)
        except RinglogError as e:
            error = e
        if reached < _last(claimed.runs[-1]):
            unread = [cut for run in claimed.runs if (cut := _run_after(run, reached)) is not None]
            # If no job was read, the nack carries the claim's number. A retry of the claim then gets other
            # leases. A job that did not fit does not count as delivered. A job that cannot be read does, so
            # that it does not stay first in the queue forever.
            yield from self._return_leases(
                message, unread, 0 if reached else message.call, undo=bool(reached) and error is None
            )
            if not reached:
                raise error or NotReady(
                    "the claimed jobs could not be read and were returned, retry later", topic=message.topic
                )
            kept = [cut for run in claimed.runs if (cut := _up_to(run, reached)) is not None]
            claimed = msgspec.structs.replace(claimed, runs=kept)
        return msgspec.structs.replace(claimed, frames=frames), b"".join(parts)

    def _read(self, claimed: m.ClaimReply, parts: list[bytes]) -> Generator[Any, Any, tuple[int, int]]:
        """Read frames with the jobs, in ascending order, into `parts`.

        Returns the number of frames and the last seq that is read. Raises only if no frame was read.
        """
        after = claimed.runs[0][0] - 1
        request = m.Read(claimed.topic, after, claimed.epoch, READ_LIMIT_MAX, READ_BYTES_MAX)
        frames = size = covered = reached = 0
        located = yield from self._locate(request)
        for run in claimed.runs:
            for _ in range(_READS_PER_RUN_MAX):
                after = max(covered, run[0] - 1)
                if after >= _last(run) or size >= READ_BYTES_MAX:
                    break
                try:
                    read = yield from self._read_frames(
                        msgspec.structs.replace(request, after=after, limit=_last(run) - after,
                                                max_bytes=READ_BYTES_MAX - size),
                        located, ReadPlan(None, after, located.head_seq),
                    )  # fmt: skip
                except RinglogError:
                    if not frames:
                        raise
                    return frames, max(reached, min(covered, _last(run)))
                if read.frames:
                    parts.append(bytes(read.data))
                    frames, size = frames + read.frames, size + len(read.data)
                if read.examined <= after:
                    break
                covered = max(covered, read.examined)
            reached = max(reached, min(covered, _last(run)))
            if covered < _last(run):
                break
        return frames, reached

    def _return_leases(
        self, message: ClaimOrSteal, runs: list[ClaimedRun], call: int, *, undo: bool
    ) -> Generator[Any, Any, None]:
        seqs = [first + n for first, count, _, _ in runs for n in range(count)]
        tokens = [token + n for _, count, _, token in runs for n in range(count)]
        entries = _words(seqs), _words(tokens)
        nack = m.Nack(message.topic, message.node, *entries, call=call, undo=undo, group=message.group)
        yield from self._ask_owner(nack)


def _last(run: ClaimedRun) -> int:
    return run[0] + run[1] - 1


def _up_to(run: ClaimedRun, seq: int) -> ClaimedRun | None:
    """Return the part of a run up to `seq`, or None."""
    first, count, deliveries, token = run
    kept = min(count, seq - first + 1)
    return (first, kept, deliveries, token) if kept > 0 else None


def _run_after(run: ClaimedRun, seq: int) -> ClaimedRun | None:
    """Return the part of a run after `seq`, or None."""
    first, count, deliveries, token = run
    dropped = min(max(seq - first + 1, 0), count)
    return (first + dropped, count - dropped, deliveries, token + dropped) if dropped < count else None


def _words(numbers: list[int]) -> bytes:
    return np.array(numbers, dtype="<u8").tobytes()
