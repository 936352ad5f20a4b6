"""Counts of answered requests in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.actors.http_gateway.admin.request_counts import (
    LABEL_BYTES_MAX,
    RequestCounts,
    sum_counts,
)
from ringlog.actors.http_gateway.routes import ROUTES
from ringlog.board.layout import BoardError
from ringlog.limits import HTTP_COUNTS_MAX


def test_a_successor_continues_the_numbers(tmp_path: Path) -> None:
    path = str(tmp_path / "counts")
    for total in (2, 4):
        counts = RequestCounts(path)
        for _ in range(2):
            counts.add("GET /v0/topics", 200)
        counts.add("-", 404)
        assert sum_counts([path]) == {("GET /v0/topics", 200): total, ("-", 404): total // 2}


def test_numbers_of_several_files_are_added(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b", "absent")]
    first, second = map(RequestCounts, paths[:2])
    first.add("x", 200)
    second.add("x", 200)
    second.add("x", 500)
    assert sum_counts(paths) == {("x", 200): 2, ("x", 500): 1}


def test_every_route_has_room_for_its_label() -> None:
    assert max(len(f"{route.name}\t500".encode()) for route in ROUTES) <= LABEL_BYTES_MAX
    assert len(ROUTES) * 16 < HTTP_COUNTS_MAX, "with sixteen statuses each"


def test_pairs_beyond_the_bound_are_not_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "counts")
    counts = RequestCounts(path)
    for number in range(HTTP_COUNTS_MAX + 5):
        counts.add("route", number)
        counts.add("r" * (LABEL_BYTES_MAX + 1), 200)
    found = sum_counts([path])
    assert found == {("route", number): 1 for number in range(HTTP_COUNTS_MAX)}
    assert sum_counts([path, path]) == dict.fromkeys(found, 2)
    RequestCounts(path).add("route", 0)
    assert sum_counts([path])["route", 0] == 2


def test_a_writer_that_died_before_its_count_leaves_no_row(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    RequestCounts(str(path)).add("first", 200)
    with path.open("r+b") as file:
        file.seek(64 + 8)
        file.write(b"a label that is longer than the next one\t200")
    assert sum_counts([str(path)]) == {("first", 200): 1}
    RequestCounts(str(path)).add("next", 204)
    assert sum_counts([str(path)]) == {("first", 200): 1, ("next", 204): 1}


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.touch(0o600)
    with pytest.raises(BoardError, match="wrong size"):
        RequestCounts(str(path))
