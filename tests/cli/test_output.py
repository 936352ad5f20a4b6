"""Output of commands in each format."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from ringlog.cli.output import (
    Format,
    Printer,
    RecordPrinter,
    payload_value,
    plain,
    printable,
    record_facts,
    to_json,
)
from ringlog.client.read.pages import Record, Tombstone

ROWS = [{"name": "a", "count": 5, "ok": True}, {"name": "long", "count": 1234, "ok": False}]


def shown(format: Format, act: Any, *, is_colored: bool = False) -> str:
    out = io.StringIO()
    act(Printer(format, is_colored=is_colored, out=out))
    return out.getvalue()


def test_a_table_aligns_numbers_right_and_text_left() -> None:
    assert shown(Format.TABLE, lambda p: p.rows(ROWS)).splitlines() == [
        "name  count  ok",
        "a         5  yes",
        "long   1234  no",
    ]


def test_wide_characters_keep_columns_aligned() -> None:
    rows = [{"name": "größe", "count": 1}, {"name": "注文", "count": 22}]
    assert shown(Format.TABLE, lambda p: p.rows(rows)).splitlines() == [
        "name   count",
        "größe      1",
        "注文      22",
    ]


def test_markup_in_data_is_text() -> None:
    rows = [{"name": "[red]a[/red] :smile:", "url": "x" * 300}]
    assert shown(Format.TABLE, lambda p: p.rows(rows)).splitlines()[1] == f"[red]a[/red] :smile:  {'x' * 300}"
    assert shown(Format.TABLE, lambda p: p.item(rows[0])).startswith("name  [red]a[/red] :smile:\n")


def test_no_rows_give_an_empty_json_list_and_no_other_output() -> None:
    """Programs that parse JSON always get a list."""
    assert shown(Format.TABLE, lambda p: p.rows([])) == ""
    assert shown(Format.NDJSON, lambda p: p.rows([])) == ""
    assert shown(Format.JSON, lambda p: p.rows([])) == "[]\n"


def test_json_is_one_document_and_ndjson_one_line_per_row() -> None:
    assert json.loads(shown(Format.JSON, lambda p: p.rows(ROWS))) == ROWS
    assert [json.loads(line) for line in shown(Format.NDJSON, lambda p: p.rows(ROWS)).splitlines()] == ROWS


def test_raw_rows_are_separated_by_tabs() -> None:
    assert shown(Format.RAW, lambda p: p.rows(ROWS)) == "a\t5\tyes\nlong\t1234\tno\n"


def test_one_item_is_an_object_or_a_list_of_values() -> None:
    assert json.loads(shown(Format.NDJSON, lambda p: p.item(ROWS[0]))) == ROWS[0]
    assert shown(Format.TABLE, lambda p: p.item(ROWS[0])) == "name   a\ncount  5\nok     yes\n"
    assert shown(Format.RAW, lambda p: p.item(ROWS[0])) == "name\ta\ncount\t5\nok\tyes\n"


def test_only_tables_are_colored() -> None:
    rows = [{"check": "disk", "verdict": "bad"}]
    assert "\x1b[31mbad" in shown(Format.TABLE, lambda p: p.rows(rows), is_colored=True)
    for format in (Format.JSON, Format.NDJSON, Format.RAW):
        assert "\x1b" not in shown(format, lambda p: p.rows(rows), is_colored=True)


def test_control_characters_in_data_are_escaped() -> None:
    assert printable("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    assert "\x1b" not in plain("\x1b]0;title\x07")
    assert printable("größe 数") == "größe 数"


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b"null", None),
        (b"18446744073709551615", 18446744073709551615),
        (b"hello", {"$text": "hello"}),
        (b"", {"$text": ""}),
        (b"\xff\x00", {"$base64": "/wA="}),
        (b'{\n "a":\r\n [1]\n}', {"a": [1]}),
    ],
)
def test_a_payload_is_json_text_or_base64_and_stays_on_one_line(data: bytes, value: object) -> None:
    """Bytes that are not JSON are shown under the key `$text` or `$base64`."""
    line = to_json({"data": payload_value(data)})
    assert "\n" not in line
    assert "\r" not in line
    assert json.loads(line)["data"] == value


def test_absent_fields_of_a_record_are_omitted() -> None:
    """The output of a minimal record has topic, seq, ts and data."""
    assert list(record_facts("t", Record(1, 2, b"1"))) == ["topic", "seq", "ts", "data"]
    full = Record(
        7, 8, b"1", key=b"k", tag="x", node="n", meta_json=b'{"m":1}', headers={"h": b"\xff"}, event_ts=9,
        expires_at=10, not_before=11, priority=2,
    )  # fmt: skip
    assert json.loads(to_json(record_facts("t", full))) == {
        "topic": "t", "seq": 7, "ts": 8, "key": "k", "tag": "x", "node": "n", "event_ts": 9, "expires_at": 10,
        "not_before": 11, "priority": 2, "meta": {"m": 1}, "headers": {"h": {"$base64": "/w=="}}, "data": 1,
    }  # fmt: skip


TOMBSTONE = Tombstone("t", 3, 9, "cap", 10, 20)


def records_shown(format: Format) -> tuple[str, bytes]:
    out, raw = io.StringIO(), io.BytesIO()
    with RecordPrinter(Printer(format, out=out), names_topic=True, raw=raw) as printer:
        printer.tombstone(TOMBSTONE)
        printer.record("t", Record(10, 0, b"a\x1b", key=b"k", tag="x"))
        printer.record("t", Record(11, 0, b"b"))
    return out.getvalue(), raw.getvalue()


def test_a_list_of_records_is_printed_as_they_come_and_ends_with_an_error() -> None:
    out = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt), RecordPrinter(Printer(Format.JSON, out=out)) as printer:
        printer.record("t", Record(1, 0, b"a"))
        assert '"seq":1' in out.getvalue()
        raise KeyboardInterrupt
    assert [item["seq"] for item in json.loads(out.getvalue())] == [1]
    for error, text in ((None, "[]\n"), (ValueError, "")):
        out = io.StringIO()
        with contextlib.suppress(ValueError), RecordPrinter(Printer(Format.JSON, out=out)):
            if error is not None:
                raise error
        assert out.getvalue() == text


def test_a_tombstone_is_printed_between_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    """Every format except raw prints it in the output."""
    table, _ = records_shown(Format.TABLE)
    assert table.splitlines() == [
        "--- lost 3..9 of t: cap ---",
        "t        10  1970-01-01T00:00:00.000Z  key=k  tag=x  a\\x1b",
        "t        11  1970-01-01T00:00:00.000Z  b",
    ]
    first, *_ = records_shown(Format.NDJSON)[0].splitlines()
    assert json.loads(first) == {"tombstone": "cap", "topic": "t", "gap_from": 3, "gap_to": 9}
    assert [next(iter(item)) for item in json.loads(records_shown(Format.JSON)[0])] == [
        "tombstone", "topic", "topic",
    ]  # fmt: skip
    assert capsys.readouterr().err == ""


def test_raw_output_contains_payloads_and_tombstones_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert records_shown(Format.RAW) == ("", b"a\x1b\nb\n")
    assert capsys.readouterr().err == "lost 3..9 of t: cap\n"
