"""`ringlog topic`: topics by hand."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format
from ringlog.cli.places import human_bytes, parse_milliseconds, rfc3339
from ringlog.config import parse_size
from ringlog.errors import UsageError

Given = Annotated[Options, Parameter(parse=False)]
_LISTED = ("topic", "type", "durability", "head_seq", "earliest_seq", "count", "bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Settings of a topic; what is not given keeps its default (create) or its value (set).

    Parameters
    ----------
    durability
        ephemeral, memory, disk or fsync.
    ttl
        Records older than this expire: 7d, 90m; 0 = never.
    cap_records
        Most records to keep; 0 = no bound.
    cap_bytes
        Most payload bytes to keep: 64MiB; 0 = no bound.
    discard
        What a write beyond the cap does: old (evict the oldest) or reject.
    compression
        none, lz4 or zstd.
    sets
        Any other setting as name=value, the value in JSON.
    """

    durability: str | None = None
    ttl: str | None = None
    cap_records: int | None = None
    cap_bytes: str | None = None
    discard: str | None = None
    compression: str | None = None
    sets: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = ()

    def values(self) -> dict[str, Any]:
        """The fields that were given, as the protocol names them; raises UsageError."""
        found: dict[str, Any] = {
            "durability": self.durability, "cap_records": self.cap_records, "discard": self.discard,
            "compression": self.compression,
        }  # fmt: skip
        found["ttl_ms"] = None if self.ttl is None else parse_milliseconds(self.ttl)
        try:
            found["cap_bytes"] = None if self.cap_bytes is None else parse_size(self.cap_bytes)
        except ValueError as e:
            raise UsageError(str(e)) from None
        given = {name: value for name, value in found.items() if value is not None}
        return given | dict(map(_setting, self.sets))


Flags = Annotated[ConfigFlags, Parameter(name="*")]


def _setting(text: str) -> tuple[str, Any]:
    import msgspec

    name, separator, value = text.partition("=")
    if not separator:
        raise UsageError("--set wants name=value", found=text)
    try:
        return name.strip(), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.strip(), value


def list_topics(prefix: str = "", *, options: Given) -> None:
    """List topics, by name.

    Parameters
    ----------
    prefix
        Only names that begin like this.
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
    """Make a topic.

    Parameters
    ----------
    topic
        Its name: 1 to 255 of A-Z a-z 0-9 . _ : -
    type
        log (the default) or queue.
    exist_ok
        Accept an existing topic of this type that has the settings given here.
    update
        Give an existing topic of this type the settings given here.
    """
    values = (flags or ConfigFlags()).values()
    if type is not None:
        values["type"] = type
    with options.connect() as client:
        info = client.topics.create(topic, exist_ok="update" if update else exist_ok, **values)
    options.printer().thing(facts_of(info))


def show(topic: str, *, options: Given) -> None:
    """Show where a topic stands and how it is configured.

    Parameters
    ----------
    topic
        Its name.
    """
    with options.connect() as client:
        state = client.topics.state(topic)
    printer = options.printer()
    facts = facts_of(state)
    if printer.format is Format.TABLE:
        facts = _flat(facts)
    printer.thing(facts)


def configure(topic: str, *, flags: Flags | None = None, options: Given) -> None:
    """Change the settings that are given; the others stay.

    Parameters
    ----------
    topic
        Its name.
    """
    values = (flags or ConfigFlags()).values()
    if not values:
        raise UsageError("name at least one setting to change", topic=topic)
    with options.connect() as client:
        info = client.topics.configure(topic, **values)
    options.printer().thing(facts_of(info))


def delete(
    topic: str,
    *,
    if_empty: Annotated[bool, Parameter(negative=())] = False,
    options: Given,
) -> int:
    """Delete a topic and all it holds. There is no way back.

    Parameters
    ----------
    topic
        Its name.
    if_empty
        Refuse while it holds records.
    """
    with options.connect() as client:
        removal = client.topics.delete(topic, if_empty=if_empty)
    options.printer().thing(facts_of(removal))
    return Exit.DONE if removal else Exit.NOT_FOUND


def facts_of(result: Any) -> dict[str, Any]:
    """A result of the client as plain values."""
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(result)
    return facts


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    config = row.get("config") or {}
    short = {name: row.get(name, config.get(name)) for name in _LISTED}
    return short | {"bytes": human_bytes(row.get("bytes", 0))}


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """State and settings in one list for people; stamps as times."""
    config = facts.pop("config", {})
    for name in ("last_write_ts", "last_read_ts"):
        if facts.get(name) is not None:
            facts[name] = rfc3339(facts[name])
    return facts | {f"config.{name}": value for name, value in config.items()}
