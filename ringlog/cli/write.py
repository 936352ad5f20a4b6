"""`ringlog write`: append lines, JSON lines or whole files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Annotated, Any

import msgspec
from cyclopts import Parameter

from ringlog.cli.option_parsing import AnyPath, human_bytes, human_count, parse_durability
from ringlog.cli.options import Options
from ringlog.cli.outcome import partly_applied
from ringlog.errors import RecordTooLarge, RinglogError, UsageError
from ringlog.limits import RECORD_BYTES_DEFAULT, RECORD_BYTES_MAX
from ringlog.types import Durability, PayloadKind

CHUNK_RECORDS = 1000
CHUNK_BYTES = 1 << 20
LARGE_MAX = 1_000
"""Number of large lines whose position is kept, so that an error of the engine can name the line."""
_PROGRESS = frozenset({"acknowledged", "failed", "stopped_by"})
"""Details of an error that say how far the command got."""


def write(
    topic: str,
    *files: AnyPath,
    lines: Annotated[bool, Parameter(negative=())] = False,
    json_lines: Annotated[bool, Parameter(negative=())] = False,
    whole: Annotated[bool, Parameter(negative=())] = False,
    key_field: str | None = None,
    durability: str | None = None,
    options: Annotated[Options, Parameter(parse=False)],
) -> None:
    """Append records from files or from standard input.

    Prints the number of acknowledged records. If the command fails after a part was appended, its exit code
    is not 2, and the error names file, line and the number of acknowledged records. If the engine refused a
    part, the error names its reason, the number of failed records, and what else stopped the command.

    Parameters
    ----------
    topic
        Topic name; the topic is created if it does not exist.
    files
        Files to read; - is standard input (default: standard input).
    lines
        Write each line as one record (the default). Empty lines are skipped.
    json_lines
        Like --lines, but each line must be JSON.
    whole
        Write each file as one record.
    key_field
        Field of each JSON line that becomes the record's key.
    durability
        Durability of this write, if higher than that of the topic: memory, disk or fsync.

    Examples
    --------
    ringlog write greetings hello.txt
    ringlog write orders orders.jsonl --json-lines --key-field id
    """
    if lines + json_lines + whole > 1:
        raise UsageError("give one of --lines, --json-lines and --whole: they exclude one another")
    if key_field is not None and not json_lines:
        raise UsageError("--key-field needs --json-lines")
    wanted = None if durability is None else parse_durability(durability)
    large: list[tuple[str, int, int]] = []
    records = _records(files or ("-",), large, is_whole=whole, json_key=(json_lines, key_field))
    try:
        facts = _write(topic, records, json_lines, wanted, options)
    except RecordTooLarge as e:
        raise refused_line(e, large) from None
    options.printer().item(facts)


def refused_line(error: RecordTooLarge, large: Iterable[tuple[str, int, int]]) -> RecordTooLarge:
    """Return the engine's error with file and line added, if the record is among the large ones."""
    wanted = error.detail.get("bytes")  # None if the write has too many records.
    for name, line, size in large:
        if size == wanted:
            found = _too_large(name, line, error.detail["max"])
            found.detail |= {name: fact for name, fact in error.detail.items() if name in _PROGRESS}
            return found
    return error


def _too_large(name: str, line: int, most: int) -> RecordTooLarge:
    if line:
        return RecordTooLarge("a line is too long for one record", file=name, line=line, max=most)
    return RecordTooLarge("the file is too large for one record", file=name, max=most)


class _JsonLine:
    """Payload codec for lines that are valid JSON: the bytes stay unchanged and are marked as JSON."""

    kind = PayloadKind.JSON

    def encode(self, value: bytes, /) -> bytes:
        """Return the line."""
        return value

    def decode(self, data: bytes, /) -> bytes:
        """Return the line."""
        return data


def _write(
    topic: str, records: Iterable[Any], is_json: bool, durability: Durability | None, options: Options
) -> dict[str, Any]:
    from ringlog.payload import RAW

    began = options.clock.monotonic_ns()
    count = size = 0
    payload = _JsonLine() if is_json else RAW
    with (
        options.connect() as client,
        client.producer(topic, durability=durability, payload=payload) as producer,
        _progress(options) as show,
    ):
        stopped_by: RinglogError | OSError | None = None
        try:
            for chunk in chunks(records):
                producer.send_many(chunk)
                count += len(chunk)
                size += sum(map(_size, chunk))
                show(count, size)
        except (RinglogError, OSError) as e:
            stopped_by = e
        report = producer.flush()
        if report.error is not None:
            raise partly_applied(_failed_in_part(report.error, report.failed, stopped_by), report.acked)
        if stopped_by is not None:
            raise partly_applied(stopped_by, report.acked)
    seconds = (options.clock.monotonic_ns() - began) / 1e9
    return {
        "topic": topic, "records": count, "bytes": size, "seconds": round(seconds, 3),
        "records_per_s": round(count / seconds) if seconds else 0,
    }  # fmt: skip


def _failed_in_part(
    error: RinglogError, failed: int, stopped_by: RinglogError | OSError | None
) -> RinglogError:
    """Return the error of records that were sent, with their number and where the input ended early.

    It takes precedence over wrong input: the acknowledged records are not the first ones of the input, and
    wrong input alone would mean that nothing else failed.
    """
    error.detail["failed"] = failed
    if stopped_by is not None:
        error.detail["stopped_by"] = str(stopped_by)
    return error


def _size(record: Any) -> int:
    return len(record if isinstance(record, bytes) else record.data)


def chunks(records: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of records that are small enough for one frame."""
    chunk: list[Any] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += _size(record)
        if len(chunk) >= CHUNK_RECORDS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# -- input --------------------------------------------------------------------------------------------


def _records(
    files: Iterable[str], large: list[tuple[str, int, int]], *, is_whole: bool,
    json_key: tuple[bool, str | None],
) -> Iterator[Any]:  # fmt: skip
    """Yield the records to write.

    Append (file, line, bytes) of records above the default limit to `large`.
    """
    is_json, key_field = json_key
    for name in files:
        with _opened(name) as file:
            found = iter([(0, _whole(file, name))]) if is_whole else split_lines(file, name)
            noted = _noting(found, name, large)
            yield from json_records(noted, name, key_field) if is_json else (data for _, data in noted)


def _noting(
    found: Iterator[tuple[int, bytes]], name: str, large: list[tuple[str, int, int]]
) -> Iterator[tuple[int, bytes]]:
    for number, data in found:
        if len(data) > RECORD_BYTES_DEFAULT and len(large) < LARGE_MAX:
            large.append((name, number, len(data)))
        yield number, data


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with open(name, "rb") as file:
        yield file


def _whole(file: IO[bytes], name: str) -> bytes:
    data = file.read(RECORD_BYTES_MAX + 1)
    if len(data) > RECORD_BYTES_MAX:
        raise _too_large(name, 0, RECORD_BYTES_MAX)
    return data


def split_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number, content) of each non-empty line, without its line break. Memory use is bounded."""
    number = 0
    while line := file.readline(RECORD_BYTES_MAX + 2):
        number += 1
        content = line.rstrip(b"\r\n")
        if len(content) > RECORD_BYTES_MAX:
            raise _too_large(name, number, RECORD_BYTES_MAX)
        if content:
            yield number, content


def json_records(lines: Iterable[tuple[int, bytes]], name: str, key_field: str | None) -> Iterator[Any]:
    """Yield the records of JSON lines, with their keys; raise UsageError with file and line."""
    from ringlog.client.write.fields import NewRecord

    decoder = msgspec.json.Decoder()
    for number, line in lines:
        try:
            value = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise UsageError("not JSON", file=name, line=number, reason=str(e)) from None
        if key_field is None:
            yield line
        else:
            yield NewRecord(data=line, key=_key(value, key_field, name, number))


def _key(value: Any, field: str, name: str, number: int) -> bytes:
    found = value.get(field) if isinstance(value, dict) else None
    if found is None:
        raise UsageError(f"no field {field!r} to take the key from", file=name, line=number)
    return found.encode() if isinstance(found, str) else msgspec.json.encode(found)


# -- progress -----------------------------------------------------------------------------------------

Show = Callable[[int, int], None]


@contextmanager
def _progress(options: Options) -> Iterator[Show]:
    if not options.shows_progress:
        yield lambda records, size: None
        return
    from rich.console import Console

    began = options.clock.monotonic_ns()
    with Console(stderr=True).status("writing") as line:

        def show(records: int, size: int) -> None:
            seconds = (options.clock.monotonic_ns() - began) / 1e9 or 1.0
            rate = human_count(records / seconds)
            line.update(f"{human_count(records)} records, {human_bytes(size)}, {rate} records/s")

        yield show
