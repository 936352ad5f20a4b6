"""`ringlog topic`: list, create, show, change and delete topics."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import human_bytes, parse_bytes, parse_milliseconds, rfc3339
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format
from ringlog.errors import UsageError

Given = Annotated[Options, Parameter(parse=False)]
_LISTED = ("topic", "type", "durability", "head_seq", "earliest_seq", "count", "bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Settings of a topic. A setting that is not given keeps its default (create) or its value (set).

    Parameters
    ----------
    durability
        Durability: ephemeral, memory, disk or fsync.
    ttl
        Age at which records expire: 7d, 90m; 0 = never.
    cap_records
        Maximum number of records; 0 = no limit.
    cap_bytes
        Maximum number of payload bytes: 64MiB; 0 = no limit.
    discard
        Handling of a write beyond the cap: old (evict the oldest records) or reject.
    compression
        Compression: none, lz4 or zstd.
    sets
        Any other setting as name=value, the value in JSON; may be given several times.
    """

    durability: str | None = None
    ttl: str | None = None
    cap_records: int | None = None
    cap_bytes: str | None = None
    discard: str | None = None
    compression: str | None = None
    sets: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = ()

    def values(self) -> dict[str, Any]:
        """Return the given settings under their names in the protocol; raise UsageError."""
        found: dict[str, Any] = {
            "durability": self.durability, "cap_records": self.cap_records, "discard": self.discard,
            "compression": self.compression,
        }  # fmt: skip
        found["ttl_ms"] = None if self.ttl is None else parse_milliseconds(self.ttl, "--ttl")
        found["cap_bytes"] = None if self.cap_bytes is None else parse_bytes(self.cap_bytes, "--cap-bytes")
        given = {name: value for name, value in found.items() if value is not None}
        return given | dict(map(_setting, self.sets))


Flags = Annotated[ConfigFlags, Parameter(name="*")]


def _setting(text: str) -> tuple[str, Any]:
    import msgspec

    name, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"--set must be name=value, got {text!r}")
    try:
        return name.strip(), msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return name.strip(), value


def list_topics(prefix: str = "", *, options: Given) -> None:
    """List topics by name.

    Parameters
    ----------
    prefix
        List only topics whose name begins with this prefix.

    Examples
    --------
    ringlog topic list
    ringlog topic list orders.
    """
    with options.connect() as client:
        rows = [facts_of(state) for state in client.topics.list(prefix=prefix)]
    printer = options.printer()
    if printer.format is Format.TABLE:
        rows = [_listed(row) for row in rows]
    printer.rows(rows)


def create(
    topic: str,
    *,
    type: str | None = None,
    exist_ok: Annotated[bool, Parameter(negative=())] = False,
    update: Annotated[bool, Parameter(negative=())] = False,
    flags: Flags | None = None,
    options: Given,
) -> None:
    """Create a topic.

    Parameters
    ----------
    topic
        Topic name: 1 to 255 of A-Z a-z 0-9 . _ : -.
    type
        Type of the topic: log (default) or queue.
    exist_ok
        Accept an existing topic of this type with the settings given here.
    update
        Change an existing topic of this type to the settings given here.

    Examples
    --------
    ringlog topic create orders --durability fsync --ttl 7d
    ringlog topic create emails --type queue --set max_deliveries=5
    """
    values = (flags or ConfigFlags()).values()
    if type is not None:
        values["type"] = type
    with options.connect() as client:
        info = client.topics.create(topic, exist_ok="update" if update else exist_ok, **values)
    options.printer().item(facts_of(info))


def show(topic: str, *, options: Given) -> None:
    """Show the state and the settings of a topic.

    Parameters
    ----------
    topic
        Topic name.

    Examples
    --------
    ringlog topic show orders
    """
    with options.connect() as client:
        state = client.topics.state(topic)
    printer = options.printer()
    facts = facts_of(state)
    if printer.format is Format.TABLE:
        facts = _flat(facts)
    printer.item(facts)


def configure(topic: str, *, flags: Flags | None = None, options: Given) -> None:
    """Change settings of a topic; the others stay.

    Parameters
    ----------
    topic
        Topic name.

    Examples
    --------
    ringlog topic set orders --cap-records 1000000
    ringlog topic set orders --set priority=5
    """
    values = (flags or ConfigFlags()).values()
    if not values:
        raise UsageError("give at least one setting to change", topic=topic)
    with options.connect() as client:
        info = client.topics.configure(topic, **values)
    options.printer().item(facts_of(info))


def delete(
    topic: str,
    *,
    if_empty: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    options: Given,
) -> int:
    """Delete a topic and all its records. This cannot be undone.

    Parameters
    ----------
    topic
        Topic name.
    if_empty
        Refuse if the topic contains records.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog topic delete orders --yes
    ringlog topic delete orders --if-empty --yes
    """
    asks = needs_confirmation(yes=yes)
    with options.connect() as client:
        if asks:
            count = client.topics.state(topic, touch=False).count
            require_confirmation(f"Delete topic {topic} and its {counted(count, 'record')}?")
        removal = client.topics.delete(topic, if_empty=if_empty)
    options.printer().item(facts_of(removal))
    return CliExit.DONE if removal else CliExit.NOT_FOUND


def facts_of(result: Any) -> dict[str, Any]:
    """Convert a result of the client to plain values."""
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(result)
    return facts


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    config = row.get("config") or {}
    short = {name: row.get(name, config.get(name)) for name in _LISTED}
    return short | {"bytes": human_bytes(row.get("bytes", 0))}


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Merge state and settings into one list for a table; convert time stamps to text."""
    config = facts.pop("config", {})
    for name in ("last_write_ts", "last_read_ts"):
        if facts.get(name) is not None:
            facts[name] = rfc3339(facts[name])
    return facts | {f"config.{name}": value for name, value in config.items()}
