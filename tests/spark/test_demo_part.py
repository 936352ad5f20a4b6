"""The Spark part of the demo: its answers compared with pandas, and in nightly runs the whole part on a few
flights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import answers, spark_stage
from demo.source import prepare, share

ROOT = Path(__file__).parent.parent.parent
FLIGHTS = 500


def test_the_pandas_answers_equal_a_plain_loop_over_the_events(tmp_path: Path) -> None:
    prepare(tmp_path, FLIGHTS)
    wanted: answers.Delays = {}
    for _, _, payload in share(tmp_path, 0, 1):
        event = json.loads(payload)
        flights, departed, minutes = wanted.get((event["carrier"], event["hour"]), (0, 0, 0))
        delay = event["dep_delay"]
        wanted[event["carrier"], event["hour"]] = (
            flights + 1,
            departed + (delay is not None),
            minutes + int(delay or 0),
        )
    found = answers.delays(FLIGHTS)
    assert answers.wrong(found, wanted) == 0
    assert sum(row[0] for row in answers.by_carrier(found).values()) == FLIGHTS


def test_every_kind_of_wrong_answer_is_counted() -> None:
    assert answers.wrong({"a": 1, "b": 2, "d": 4}, {"a": 1, "b": 3, "c": 4}) == 3


@pytest.mark.slow
def test_the_picture_shows_carriers_and_hours_that_have_no_flights(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "delays.png"
    answers.draw({("AA", 5): (3, 2, 30), ("UA", 23): (1, 0, 0)}, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_agrees_with_pandas_after_a_kill_of_its_stream(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "demo", "--spark", "--limit", "8000", "--producers", "2", "--kills", "1"]
    command += ["--dir", str(tmp_path / "work"), "--out", str(out)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["spark"]
    assert (found["wrong_log"], found["wrong_parquet"], found["wrong_live"]) == (0, 0, 0)
    assert found["archived"] == found["live_flights"] == 8000
    assert 0 < found["counted_at_kill"] < 8000
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")


def test_without_java_the_demo_reports_the_missing_requirement(monkeypatch, tmp_path):
    assert spark_stage.missing_requirement() == ""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("ringlog.spark.jre.PACKAGE", "no_such_package")
    assert "Java 17" in spark_stage.missing_requirement()
