"""What a supervisor tells an actor when it starts it: one JSON argument, validated at both ends."""

from __future__ import annotations

import msgspec


class ActorBoot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything one incarnation of an actor needs to know. Paths are absolute."""

    kind: str
    name: str
    """`wal_shard-00`; also the process title and the stem of its socket and bell."""
    engine_id: str
    incarnation: int
    """Grows with every start of any actor of this data directory; never reused."""
    boot_incarnation: int
    """First incarnation number of this start of the engine: files of other streams below it are history."""
    boot_id: str
    """The kernel's boot identity (D-19)."""
    time_base_us: int = 0
    """What is added to monotonic time for the time in which leases and waits are counted; 0 = find one."""
    slot: int
    """Index of its process slot on the board."""
    data_dir: str
    shm_dir: str
    """Rings, board, sockets and bells of this engine; 0700."""
    gateway_socket: str = ""
    """Where the gateway listens for programs of this host."""
    supervisor_pid: int
    shard: int = -1
    shards: int = 1
    config: dict[str, object] = {}
    """The effective configuration (config.Config as plain values)."""
    is_background: bool = False
    """It tidies up behind the others, at the lowest priority."""
    is_expendable: bool = False
    """It keeps no promise and begins anew what was begun: when its supervisor dies it is killed."""
    read_only_ms: int = 0
    """Not 0: serve reads without writing anything, and look after so many milliseconds, then again, whether
    the directory takes writes; end when it does."""
    test_stop_points: str = ""
    """`name:n:action,…` for test builds (FH-6); empty in production."""


FORK_REQUEST_BYTES_MAX = 65_536
"""One larger than this is not sent: its child is spawned."""
PID_BYTES_MAX = 16


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a child that was forked is to be (MessagePack, one packet)."""

    kind: str
    boot: str
    """As `dump_boot` makes it."""
    environ: dict[str, str]


def dump_boot(boot: ActorBoot) -> str:
    """Encode for the command line."""
    return msgspec.json.encode(boot).decode()


def load_boot(text: str) -> ActorBoot:
    """Decode; raises msgspec.ValidationError naming the field."""
    return msgspec.json.decode(text, type=ActorBoot)
