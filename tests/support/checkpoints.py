"""Checkpoints of a running engine."""

from __future__ import annotations

from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import NotReady
from ringlog.link.address import read_engine_file
from ringlog.link.shard_requests import Requester
from ringlog.testing.real_engine import TestEngine, wait_until

WAIT_S = 60.0


def checkpoint(running: TestEngine) -> list[str]:
    """Let the compactor turn everything written so far into segments. Return its files."""
    info = read_engine_file(running.run_dir)
    assert info is not None
    requester = Requester("compactor", f"ipc://{info.shm_dir}/compactor.sock")
    made: list[CheckpointMade] = []

    def is_made() -> bool:
        try:
            made.append(requester.ask(CheckpointNow(), CheckpointMade, timeout_s=30).message)
        except NotReady:
            return False  # The compactor starts after the shards, and restarts with each of them.
        return True

    try:
        wait_until(is_made, WAIT_S, "the compactor makes a checkpoint")
    finally:
        requester.close()
    return made[0].files
