"""Golden frames: bytes that must never change, read by both decoders (RD-25)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from frame_samples import EVERY_COLUMN, GOLDEN_SEED, golden_frames

from ringlog.frame import FrameView, open_frame
from ringlog.types import Codec
from ringlog.verify.frame_decoder import DecodedFrame, decode_frame

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "frames"
HEADER_FIELDS = (
    "topic_id", "base_seq", "commit_ts", "count", "epoch", "producer_id", "producer_seq", "codec",
    "durability", "payload_kind",
)  # fmt: skip
DESCRIBED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "frames.json").read_text())


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def as_json(found: DecodedFrame) -> dict[str, list[Any]]:
    def plain(value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) else value

    columns = {name: [plain(value) for value in values] for name, values in found.columns.items()}
    if "headers" in columns:
        columns["headers"] = [[[k, v.hex()] for k, v in row] for row in found.columns["headers"]]
    return columns


def test_every_golden_frame_is_described_and_there_are_enough() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(DESCRIBED) == set(golden_frames())
    assert len(DESCRIBED) >= 8


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_the_second_decoder_reads_what_the_description_says(name: str) -> None:
    """RD-25: the decoder written from the page."""
    described = DESCRIBED[name]
    found = decode_frame(golden(name), 0, GOLDEN_SEED)
    assert as_json(found) == described["columns"]
    assert found.control == described["control"]
    for field in ("type", *HEADER_FIELDS):
        assert getattr(found, field) == described[field], field


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_the_engine_reads_what_the_description_says(name: str) -> None:
    described = DESCRIBED[name]
    view: FrameView = open_frame(golden(name), seed=GOLDEN_SEED)
    for field in HEADER_FIELDS:
        assert getattr(view, field) == described[field], field
    assert view.frame_type == described["type"]
    if described["control"] is not None:
        assert view.control() == described["control"]
        return
    assert [payload.hex() for payload in view.to_list()] == described["columns"]["payload"]
    tags = view.records().tags
    assert ([tag or "" for tag in tags] if tags is not None else None) == described["columns"].get("tag")


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_encoding_makes_the_golden_bytes_again(name: str) -> None:
    """Compressed bytes are the compressor's business: there only the records must come out the same."""
    made = bytes(golden_frames()[name][1])
    if DESCRIBED[name]["codec"] == Codec.NONE:
        assert made == golden(name)
    else:
        remade = decode_frame(made, 0, GOLDEN_SEED)
        assert remade.columns == decode_frame(golden(name), 0, GOLDEN_SEED).columns
        assert remade.codec == DESCRIBED[name]["codec"]


def test_a_frame_with_every_column_gives_back_what_was_written() -> None:
    records = open_frame(golden("every_column"), seed=GOLDEN_SEED).records()
    assert records.seqs == [1_000, 1_001, 1_002]
    for name, values in EVERY_COLUMN.items():
        expected = [value or [] for value in values] if name == "headers" else values
        assert getattr(records, name) == expected, name


def test_the_worked_frame_on_the_format_page_is_the_golden_one() -> None:
    page = (ROOT / "docs" / "format.md").read_text()
    block = re.search(r"```hex\n(.*?)```", page, re.DOTALL)
    assert block is not None
    rows = [re.match(r"((?:[0-9a-f]{2,} )+)", line + " ") for line in block[1].splitlines()]
    digits = "".join(row[1].replace(" ", "") for row in rows if row is not None)
    assert bytes.fromhex(digits) == golden("payload_only")
