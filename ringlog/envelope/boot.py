"""Boot message of an actor: one JSON argument from the supervisor, which both processes validate."""

from __future__ import annotations

import msgspec


class ActorBoot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that one incarnation of an actor needs to start. Paths are absolute."""

    kind: str
    name: str
    """For example `wal_shard-00`. Also the process title and the stem of the socket's and the bell's file
    name."""
    engine_id: str
    incarnation: int
    """Grows with every start of any actor of this data directory; never reused."""
    boot_incarnation: int
    """First incarnation number of this start of the engine. Log files with a lower number are from earlier
    starts."""
    boot_id: str
    """Boot id of the kernel. It changes when the host restarts."""
    time_base_us: int = 0
    """Offset in microseconds that is added to monotonic time. Leases and delays use the sum. 0 = the actor
    computes an offset."""
    slot: int
    """Index of the actor's process slot on the board."""
    data_dir: str
    shm_dir: str
    """Directory with the rings, board, sockets and bells of this engine; mode 0700."""
    run_dir: str = ""
    """Run directory of the engine, the address of its clients on this host."""
    gateway_socket: str = ""
    """Path of the socket on which the gateway listens for local clients."""
    supervisor_pid: int
    shard: int = -1
    shards: int = 1
    config: dict[str, object] = {}
    """The effective configuration (config.Config as plain values)."""
    is_background: bool = False
    """The actor is a background process (compactor, reclaimer, relocator) and runs at the lowest priority."""
    is_expendable: bool = False
    """The actor makes no promise that must survive it: its successor repeats unfinished work. It receives
    SIGKILL when the supervisor dies; other actors receive SIGTERM."""
    read_only_ms: int = 0
    """Not 0: the shard serves reads and writes nothing. After this many milliseconds it first checks whether
    its directory is writable, then after twice the time. It exits when the directory is writable."""
    test_stop_points: str = ""
    """Stop points of test builds: `name:n:action,…`. Empty in production."""


FORK_REQUEST_BYTES_MAX = 65_536
"""If a fork request is larger, the supervisor does not send it and starts the child from its command line."""
PID_BYTES_MAX = 16


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the fork server: the child to fork (MessagePack, one packet)."""

    kind: str
    boot: str
    """Encoded by `dump_boot`."""
    environ: dict[str, str]


def dump_boot(boot: ActorBoot) -> str:
    """Encode for the command line."""
    return msgspec.json.encode(boot).decode()


def load_boot(text: str) -> ActorBoot:
    """Decode a boot message. Raises msgspec.ValidationError, which names the field."""
    return msgspec.json.decode(text, type=ActorBoot)
