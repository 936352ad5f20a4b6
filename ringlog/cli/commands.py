"""Table of commands: the top-level help lists it without importing modules of commands.

A help line in this table must equal the first line of the function's docstring (tests/cli/test_help.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A function that is imported when its command runs. `alias` is an older name that help does not show."""

    import_path: str
    help: str
    alias: str = ""


class CommandGroup(NamedTuple):
    """Commands with a common first word."""

    help: str
    commands: dict[str, Command]
    alias: str = ""


COMMANDS: dict[str, dict[str, Command | CommandGroup]] = {
    "Run": {
        "serve": Command(
            "ringlog.cli.serve:serve",
            "Run the engine in the foreground until SIGTERM or Ctrl-C.",
        ),
        "status": Command(
            "ringlog.cli.status:status",
            "Show the engine's processes, restarts, disk and readiness.",
        ),
        "metrics": Command(
            "ringlog.cli.metrics:metrics",
            "Print or serve the engine's metrics in the Prometheus text format.",
        ),
        "doctor": Command(
            "ringlog.cli.doctor:doctor",
            "Check kernel, shared memory, limits, clock, disk, Python and packages.",
        ),
        "version": Command(
            "ringlog.cli.version:version",
            "Print the versions of ringlog, its protocol and Python.",
        ),
        "config": CommandGroup(
            "Show and check settings.",
            {
                "show": Command("ringlog.cli.settings:show", "Show every setting with its value and source."),
                "check": Command(
                    "ringlog.cli.settings:check",
                    "Check the configuration as `ringlog serve` reads it.",
                ),
                "env": Command(
                    "ringlog.cli.settings:env",
                    "List the environment variables that ringlog reads.",
                ),
            },
        ),
    },
    "Write and read": {
        "write": Command("ringlog.cli.write:write", "Append records from files or from standard input."),
        "read": Command("ringlog.cli.read:read", "Print the records of a topic up to its current end."),
        "tail": Command("ringlog.cli.read:tail", "Print records of topics as they are committed."),
        "delete": Command("ringlog.cli.delete:delete", "Delete records of a topic. This cannot be undone."),
        "topic": CommandGroup(
            "List, create, show, change and delete topics.",
            {
                "list": Command("ringlog.cli.topic:list_topics", "List topics by name."),
                "create": Command("ringlog.cli.topic:create", "Create a topic."),
                "show": Command("ringlog.cli.topic:show", "Show the state and the settings of a topic."),
                "set": Command("ringlog.cli.topic:configure", "Change settings of a topic; the others stay."),
                "delete": Command(
                    "ringlog.cli.topic:delete",
                    "Delete a topic and all its records. This cannot be undone.",
                ),
            },
        ),
        "router": CommandGroup(
            "List, create, show and delete routers.",
            {
                "list": Command("ringlog.cli.router:list_routers", "List routers by name."),
                "create": Command(
                    "ringlog.cli.router:create",
                    "Create a router: forward new records of a topic to another topic.",
                ),
                "show": Command(
                    "ringlog.cli.router:show",
                    "Show the settings and the progress of a router.",
                    alias="get",
                ),
                "delete": Command("ringlog.cli.router:delete", "Delete a router; existing copies stay."),
            },
        ),
    },
    "Queues": {
        "put": Command("ringlog.cli.jobs:put", "Add jobs to a queue."),
        "claim": Command("ringlog.cli.jobs:claim", "Lease jobs exclusively until their lease expires."),
        "ack": Command(
            "ringlog.cli.jobs:ack",
            "Acknowledge jobs: delete them from the queue. This cannot be undone.",
        ),
        "nack": Command("ringlog.cli.jobs:nack", "Return jobs to the queue."),
        "extend": Command("ringlog.cli.jobs:extend", "Extend the leases of jobs, counted from now."),
        "reject": Command("ringlog.cli.jobs:reject", "Move jobs to the dead letters immediately."),
        "peek": Command("ringlog.cli.jobs:peek", "Print the first jobs of a queue without claiming them."),
        "queue": CommandGroup(
            "Show and purge queues.",
            {
                "stats": Command("ringlog.cli.queue:stats", "Show the number of jobs by state."),
                "pending": Command(
                    "ringlog.cli.queue:pending",
                    "List claimed jobs that are not done: holder, deadline, last failure.",
                ),
                "purge": Command(
                    "ringlog.cli.queue:purge",
                    "Delete all jobs of a queue, leased ones included. This cannot be undone.",
                ),
            },
        ),
        "dead-letter": CommandGroup(
            "List, show, redrive and purge dead letters.",
            {
                "list": Command(
                    "ringlog.cli.dead_letters:list_dead_letters",
                    "List dead letters, oldest first.",
                ),
                "show": Command("ringlog.cli.dead_letters:show", "Print one dead letter."),
                "redrive": Command(
                    "ringlog.cli.dead_letters:redrive",
                    "Return dead letters to their queue, or to their group for redelivery.",
                ),
                "purge": Command(
                    "ringlog.cli.dead_letters:purge",
                    "Delete all dead letters. This cannot be undone.",
                ),
            },
            alias="dead",
        ),
        "worker": Command(
            "ringlog.cli.worker:worker",
            "Run a function for each job of a queue, in separate processes.",
        ),
    },
    "Groups": {
        "group": CommandGroup(
            "List, show, move and delete consumer groups.",
            {
                "list": Command(
                    "ringlog.cli.group:list_groups",
                    "List consumer groups with their cursor, floor and pending count.",
                ),
                "show": Command(
                    "ringlog.cli.group:show",
                    "Show the counts and the members of a consumer group.",
                ),
                "lag": Command(
                    "ringlog.cli.group:lag",
                    "Show the lag of consumer groups: undelivered and pending records.",
                ),
                "pending": Command(
                    "ringlog.cli.group:pending",
                    "List delivered records of a group that are not done.",
                ),
                "seek": Command(
                    "ringlog.cli.group:seek",
                    "Move a consumer group to another position. All pending entries are dropped.",
                ),
                "reset": Command(
                    "ringlog.cli.group:reset",
                    "Move a consumer group to the first record. All pending entries are dropped.",
                ),
                "delete": Command(
                    "ringlog.cli.group:delete",
                    "Delete a consumer group; records stay. This cannot be undone.",
                ),
            },
        ),
    },
    "Operate": {
        "key": CommandGroup(
            "Create, list and revoke keys of HTTP and TCP clients.",
            {
                "new": Command(
                    "ringlog.cli.key:new",
                    "Create a key and add it to the keys file. The secret is printed once.",
                ),
                "list": Command(
                    "ringlog.cli.key:list_keys",
                    "List the keys of the keys file with their rights. Secrets are never shown.",
                ),
                "revoke": Command(
                    "ringlog.cli.key:revoke",
                    "Remove a key from the keys file. This cannot be undone.",
                ),
                "pair": Command(
                    "ringlog.cli.key:pair",
                    "Create a CURVE key pair in a new file: for a server, or for a client on its own host.",
                ),
            },
        ),
        "verify": Command(
            "ringlog.cli.verify:verify",
            "Verify every byte of a stopped engine's data directory.",
        ),
        "inspect": Command(
            "ringlog.cli.inspect:inspect",
            "Show the header, frames, marks and tables of one data file.",
        ),
        "repair": Command(
            "ringlog.cli.repair.command:repair", "Build a repaired copy of a damaged data directory."
        ),
        "backup": Command(
            "ringlog.cli.backup:backup",
            "Copy the data of an engine into a new directory, verified and consistent.",
        ),
        "restore": Command(
            "ringlog.cli.restore:restore",
            "Check a backup and copy it into a new data directory.",
        ),
        "checkpoint": Command(
            "ringlog.cli.maintenance:checkpoint",
            "Compact the log into segments now and write a snapshot.",
        ),
        "scrub": Command(
            "ringlog.cli.maintenance:scrub",
            "Verify all segments and snapshots of a running engine once, now.",
        ),
        "bench": CommandGroup(
            "Measure an engine through the public client, and this machine.",
            {
                "append": Command("ringlog.cli.bench:append", "Measure appends by several processes."),
                "read": Command("ringlog.cli.bench:read", "Fill a topic and measure every way to read it."),
                "ring": Command(
                    "ringlog.cli.bench:ring",
                    "Measure the round trip to a shard without a disk.",
                ),
                "sync": Command(
                    "ringlog.cli.bench:sync",
                    "Measure fdatasync of the disk, without an engine.",
                ),
            },
        ),
        "chaos": Command(
            "ringlog.cli.chaos:chaos",
            "Kill processes of an engine under load and check its promises.",
        ),
        "spark": CommandGroup(
            "Run Spark jobs over whole topics (extra `spark`).",
            {
                "archive": Command(
                    "ringlog.cli.spark:archive",
                    "Archive topics as Parquet files by topic and date.",
                ),
                "verify": Command(
                    "ringlog.cli.spark:verify",
                    "Verify every stored frame while the engine runs.",
                ),
                "replay": Command(
                    "ringlog.cli.spark:replay",
                    "Copy records of topics into other topics, each once.",
                ),
                "backfill": Command(
                    "ringlog.cli.spark:backfill",
                    "Write Parquet files into topics, each row once.",
                ),
                "compact": Command(
                    "ringlog.cli.spark:compact",
                    "List records to delete by tag or age; delete them with --apply.",
                ),
                "stats": Command(
                    "ringlog.cli.spark:stats",
                    "Show sizes, rates, tags and lag of topics, from indexes alone.",
                ),
                "mirror": Command(
                    "ringlog.cli.spark:mirror",
                    "Stream topics into a Spark sink: Parquet, Delta, Iceberg or Kafka.",
                ),
                "recover": Command(
                    "ringlog.cli.spark:recover",
                    "Finish writes whose driver failed before the commit.",
                ),
                "discard": Command(
                    "ringlog.cli.spark:discard",
                    "Give up a write that cannot be finished.",
                ),
            },
        ),
    },
    "Shell": {
        "--install-completion": Command(
            "ringlog.cli.completion:install", "Install the shell completion of ringlog."
        ),
    },
}
"""Section of the help -> name -> command, in the order of the help."""
