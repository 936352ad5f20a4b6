"""Output of commands: a table for users, JSON for programs, raw bytes for pipes.

`table` is the default on a terminal, `ndjson` elsewhere. Results go to stdout, everything else to stderr. In
`json` and `ndjson`, numbers stay numbers and names are those of the protocol.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import IO, TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ringlog.client.read.pages import Record, Tombstone
    from ringlog.client.watches.events import Lagged, TopicDeleted

STYLES = {"ok": "green", "ready": "green", "warn": "yellow", "bad": "red", "failed": "red", "lost": "red"}
"""Styles of words in the cells of tables."""
_WIDE = 10_000
"""Columns of an output that is no terminal: nothing is wrapped."""


class Format(Enum):
    """Values of --output."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    RAW = "raw"


Row = Mapping[str, Any]


class Printer:
    """Prints results in one format. `is_colored` affects only tables."""

    def __init__(self, format: Format, *, is_colored: bool = False, out: IO[str] | None = None) -> None:
        self.format = format
        self._is_colored = is_colored and format is Format.TABLE
        self._out = out or sys.stdout

    def rows(self, rows: Sequence[Row]) -> None:
        """Print several items of one kind. The keys of the first row are the columns."""
        if self.format is Format.JSON:
            self._line(to_json(list(rows)))
        elif self.format is Format.NDJSON:
            for row in rows:
                self._line(to_json(row))
        elif self.format is Format.RAW:
            for row in rows:
                self._line("\t".join(plain(value) for value in row.values()))
        elif rows:
            self._show(_table(rows))

    def item(self, facts: Row) -> None:
        """Print one item with its fields."""
        if self.format in {Format.JSON, Format.NDJSON}:
            self._line(to_json(facts))
        elif self.format is Format.RAW:
            for name, value in facts.items():
                self._line(f"{name}\t{plain(value)}")
        else:
            self._show(_grid(facts))

    def caption(self, text: str) -> None:
        """Print a line between tables; nothing in other formats."""
        if self.format is Format.TABLE:
            self._line(text)

    def text(self, text: str) -> None:
        """Print text unchanged in every format."""
        self._out.write(text)

    def clear_screen(self) -> None:
        """Clear the terminal before a refresh; nothing in other formats."""
        if self.format is Format.TABLE and self._out.isatty():
            self._out.write("\x1b[H\x1b[2J")

    def flush(self) -> None:
        """Flush the buffered output."""
        self._out.flush()

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")

    def _show(self, shown: RenderableType) -> None:
        from rich.console import Console

        console = Console(
            file=self._out, color_system="standard" if self._is_colored else None, highlight=False,
            force_terminal=self._is_colored, width=None if self._out.isatty() else _WIDE,
        )  # fmt: skip
        with console.capture() as captured:
            console.print(shown)
        for line in captured.get().splitlines():
            self._line(line.rstrip())


def _table(rows: Sequence[Row]) -> RenderableType:
    """Return a table with a header. Numbers are aligned right, text left."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in rows[0]:
        is_number = all(_is_number(row.get(name)) for row in rows)
        table.add_column(Text(name), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        cells = [plain(row.get(name)) for name in rows[0]]
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in cells))
    return table


def _grid(facts: Row) -> RenderableType:
    """Return names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        grid.add_column(overflow="fold")
    for name, value in facts.items():
        cell = plain(value)
        grid.add_row(Text(name, "bold"), Text(cell, STYLES.get(cell, "")))
    return grid


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def plain(value: Any) -> str:
    """Format a value for a table cell, always as one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list | dict):
        return to_json(value)
    return str(value)


def printable(text: str) -> str:
    """Escape control characters: text from other users must not control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def to_json(value: Any) -> str:
    """Encode a value as compact JSON."""
    return msgspec.json.encode(value, enc_hook=str).decode()


# -- records --------------------------------------------------------------------------------------------


def payload_value(data: bytes | None) -> Any:
    """Return a payload for JSON output.

    JSON stays as it is. Other text is {"$text": …}, other bytes are {"$base64": …}, and null is {"$null":
    true}."""
    if data is None:
        return {"$null": True}
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _text_value(data)
    # A line break between JSON tokens would end an ndjson line early.
    return msgspec.Raw(msgspec.json.format(data, indent=-1) if b"\n" in data or b"\r" in data else data)


def _text_value(data: bytes) -> dict[str, str]:
    try:
        return {"$text": data.decode()}
    except UnicodeDecodeError:
        return {"$base64": base64.b64encode(data).decode()}


def bytes_value(data: bytes) -> Any:
    """Return a key or header value for JSON output: text if it is UTF-8, else {"$base64": …}."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"$base64": base64.b64encode(data).decode()}


def record_facts(topic: str, record: Record) -> dict[str, Any]:
    """Return the fields that a record has, for JSON output; times in microseconds."""
    facts: dict[str, Any] = {"topic": topic, "seq": record.seq, "ts": record.ts}
    if record.key is not None:
        facts["key"] = bytes_value(record.key)
    for name in ("tag", "node", "event_ts", "expires_at", "not_before"):
        value = getattr(record, name)
        if value is not None:
            facts[name] = value
    if record.priority:
        facts["priority"] = record.priority
    if record.meta_json:
        facts["meta"] = msgspec.Raw(record.meta_json)
    if record.headers:
        facts["headers"] = {name: bytes_value(value) for name, value in record.headers.items()}
    facts["data"] = payload_value(record.data)
    return facts


def tombstone_facts(tombstone: Tombstone) -> dict[str, Any]:
    """Return a tombstone for JSON output. Its first key, `tombstone`, distinguishes it from a record."""
    return {
        "tombstone": tombstone.reason,
        "topic": tombstone.topic,
        "gap_from": tombstone.gap_from,
        "gap_to": tombstone.gap_to,
    }


class RecordPrinter:
    """Prints records and tombstones in order of arrival. A context manager: leaving it ends the output.

    `json` is one list. It is printed as the records come, because they may have no end.
    """

    def __init__(self, printer: Printer, *, names_topic: bool = False, raw: IO[bytes] | None = None) -> None:
        self._printer = printer
        self._names_topic = names_topic
        self._raw = raw or sys.stdout.buffer
        self._has_begun = False

    def __enter__(self) -> RecordPrinter:
        """Return this printer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the output, also if the records ended by an error or an interrupt."""
        if kind is None or self._has_begun:
            self._close()

    def record(self, topic: str, record: Record) -> None:
        """Print one record: a table line, a JSON object, or (raw) the payload and a line break."""
        match self._printer.format:
            case Format.RAW:
                self._raw.write((record.data or b"") + b"\n")
            case Format.NDJSON:
                self._printer.item(record_facts(topic, record))
            case Format.JSON:
                self._listed(record_facts(topic, record))
            case Format.TABLE:
                self._printer.caption(self._human(topic, record))

    def tombstone(self, tombstone: Tombstone) -> None:
        """Print one tombstone; with raw output, to stderr."""
        text = f"lost {tombstone.gap_from}..{tombstone.gap_to} of {tombstone.topic}: {tombstone.reason}"
        match self._printer.format:
            case Format.RAW:
                print(text, file=sys.stderr)
            case Format.NDJSON:
                self._printer.item(tombstone_facts(tombstone))
            case Format.JSON:
                self._listed(tombstone_facts(tombstone))
            case Format.TABLE:
                self._printer.caption(f"--- {text} ---")

    def print_event(self, text: str, event: TopicDeleted | Lagged) -> None:
        """Print another event of a topic; with raw output, to stderr."""
        facts = {"event": event.kind, **asdict(event)}
        match self._printer.format:
            case Format.RAW:
                print(text, file=sys.stderr)
            case Format.NDJSON:
                self._printer.item(facts)
            case Format.JSON:
                self._listed(facts)
            case Format.TABLE:
                self._printer.caption(f"--- {text} ---")

    def flush(self) -> None:
        """Flush the printed output."""
        if self._printer.format is Format.RAW:
            self._raw.flush()
        self._printer.flush()

    def _close(self) -> None:
        if self._printer.format is Format.JSON:
            self._printer.text("]\n" if self._has_begun else "[]\n")
        self.flush()

    def _listed(self, facts: Row) -> None:
        self._printer.text((",\n" if self._has_begun else "[") + to_json(facts))
        self._has_begun = True

    def _human(self, topic: str, record: Record) -> str:
        from ringlog.cli.option_parsing import rfc3339

        parts = [f"{record.seq:>8}", rfc3339(record.ts)]
        if self._names_topic:
            parts.insert(0, topic)
        if record.key is not None:
            parts.append(f"key={printable(record.key.decode('utf-8', 'backslashreplace'))}")
        if record.tag is not None:
            parts.append(f"tag={printable(record.tag)}")
        parts.append(printable((record.data or b"").decode("utf-8", "backslashreplace")))
        return "  ".join(parts)
