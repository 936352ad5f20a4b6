"""The how-to page for Spark: its Python blocks run in order against a real engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ringlog
from ringlog.testing.real_engine import TestEngine, engine

pytestmark = pytest.mark.night

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "how-to" / "spark.md"
OPTIONS = DOCS / "reference" / "spark-options.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECORDS = 300


def blocks() -> list[tuple[str, int]]:
    """Return (code, line number) of every block."""
    text = PAGE.read_text()
    return [(m[1], text.count("\n", 0, m.start(1)) + 1) for m in BLOCK.finditer(text)]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with 300 orders, and a directory for the output of the page."""
    with engine(directory=tmp_path / "shop", storage={"enabled": True}) as running:
        with ringlog.connect(running.url) as log:
            log.topics.create("orders", durability="fsync")
            with log.producer("orders") as out:
                for n in range(1, RECORDS + 1):
                    tag = ("eu", "eu-west", "us")[n % 3]
                    out.send(b'{"order":%d,"amount":%d}' % (n, n * n), key=b"customer-%d" % (n % 7), tag=tag)
        monkeypatch.setenv("RINGLOG_DATA", running.data_dir)
        yield running


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("spark")
def test_every_block_of_the_page_runs_in_order(
    spark: Any, shop: TestEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "docs/how-to/spark.md"}
    for code, line in blocks():
        exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
    assert names["spark"].sparkContext is spark.sparkContext
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{RECORDS} orders"
    assert "102" in printed, "the first of the tags eu and eu-* from 101 on"
    assert f"{RECORDS} records in 1 files" in printed
