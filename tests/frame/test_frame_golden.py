"""Golden frames: bytes that must never change, read by the engine's decoder and by the verifier's decoder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringlog.frame import FrameView, layout, open_frame
from ringlog.types import Codec
from ringlog.verify.frame_decoder import DecodedFrame, decode_frame
from tests.support.frame_samples import EVERY_COLUMN, GOLDEN_SEED, NULLS, golden_frames

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "frames"
FIRST = ROOT / "tests" / "golden" / "v1" / "frames"
"""Golden frames of format version 1: readers still accept them, writers do not write them."""
HEADER_FIELDS = (
    "topic_id", "base_seq", "commit_ts", "count", "epoch", "producer_id", "producer_seq", "codec",
    "durability", "payload_kind",
)  # fmt: skip
DESCRIBED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "frames.json").read_text())
DESCRIBED_FIRST: dict[str, dict[str, Any]] = json.loads((FIRST / "frames.json").read_text())
OF_EACH_VERSION = pytest.mark.parametrize(
    ("path", "described"),
    [
        *((GOLDEN / f"{name}.hex", each) for name, each in sorted(DESCRIBED.items())),
        *((FIRST / f"{name}.hex", each) for name, each in sorted(DESCRIBED_FIRST.items())),
    ],
    ids=lambda each: f"{each.parts[-3]}-{each.stem}" if isinstance(each, Path) else "",
)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def as_json(found: DecodedFrame) -> dict[str, list[Any]]:
    def plain(value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) else value

    columns = {name: [plain(value) for value in values] for name, values in found.columns.items()}
    if "headers" in columns:
        columns["headers"] = [[[k, v.hex()] for k, v in row] for row in found.columns["headers"]]
    return columns


def test_every_golden_frame_has_a_description() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(DESCRIBED) == set(golden_frames())
    assert len(DESCRIBED) >= 8


@OF_EACH_VERSION
def test_the_verifier_reads_golden_frames_as_described(path: Path, described: dict[str, Any]) -> None:
    """The verifier's decoder is written from the format page, independently of the engine."""
    found = decode_frame(bytes.fromhex(path.read_text()), 0, GOLDEN_SEED)
    assert as_json(found) == described["columns"]
    assert found.control == described["control"]
    for field in ("type", *HEADER_FIELDS):
        assert getattr(found, field) == described[field], field


@OF_EACH_VERSION
def test_the_engine_reads_golden_frames_as_described(path: Path, described: dict[str, Any]) -> None:
    view: FrameView = open_frame(bytes.fromhex(path.read_text()), seed=GOLDEN_SEED)
    for field in HEADER_FIELDS:
        assert getattr(view, field) == described[field], field
    assert view.frame_type == described["type"]
    if described["control"] is not None:
        assert view.control() == described["control"]
        return
    columns, records = described["columns"], view.records()
    is_first = view.header.version == layout.VERSION_FIRST
    for name in ("payload", "key", "tag", "node"):
        expected = columns.get(name)
        if expected is not None and is_first and name != "payload":
            expected = [value or None for value in expected]
        found: Any = getattr(records, f"{name}s")
        if found is not None and name in ("payload", "key"):
            found = [None if value is None else value.hex() for value in found]
        assert found == expected, name


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_encoding_reproduces_the_golden_bytes(name: str) -> None:
    """Compressed bytes depend on the compressor's version: for compressed frames the test compares only the
    records."""
    made = bytes(golden_frames()[name][1])
    if DESCRIBED[name]["codec"] == Codec.NONE:
        assert made == golden(name)
    else:
        remade = decode_frame(made, 0, GOLDEN_SEED)
        assert remade.columns == decode_frame(golden(name), 0, GOLDEN_SEED).columns
        assert remade.codec == DESCRIBED[name]["codec"]


def test_a_frame_with_every_column_returns_the_written_values() -> None:
    records = open_frame(golden("every_column"), seed=GOLDEN_SEED).records()
    assert records.seqs == [1_000, 1_001, 1_002]
    for name, values in EVERY_COLUMN.items():
        expected = [value or [] for value in values] if name == "headers" else values
        assert getattr(records, name) == expected, name


def test_null_and_empty_values_stay_distinct() -> None:
    records = open_frame(golden("nulls"), seed=GOLDEN_SEED).records()
    for name, values in NULLS.items():
        assert getattr(records, name) == values, name


def test_the_example_frame_on_the_format_page_is_the_golden_frame() -> None:
    page = (ROOT / "docs" / "reference" / "format.md").read_text()
    block = re.search(r"```hex\n(.*?)```", page, re.DOTALL)
    assert block is not None
    rows = [re.match(r"((?:[0-9a-f]{2,} )+)", line + " ") for line in block[1].splitlines()]
    digits = "".join(row[1].replace(" ", "") for row in rows if row is not None)
    assert bytes.fromhex(digits) == golden("payload_only")
