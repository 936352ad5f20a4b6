"""The class of kills: a small slice passes, and a planted bug is detected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ringlog
from chaos.check.keys import KEY_VALUES, check_keys, tried_twice
from chaos.kills import forwarding, points
from chaos.kills.rig import Engine
from chaos.kills.scene import Stage
from chaos.order import Account, Order
from chaos.rigs import work
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.drill import journal, targets
from ringlog.drill.drill import DrillOptions
from ringlog.drill.history import judge
from ringlog.drill.journal import Journal, Outcome, What
from ringlog.drill.load import Stuck, wait_for
from ringlog.drill.nursery import Nursery
from ringlog.drill.pauses import longest_gap_ms
from ringlog.drill.tasks import Report, Task
from ringlog.errors import UsageError
from ringlog.link.delivery import Delivery
from ringlog.stop_points import POINTS, configure
from ringlog.supervision.tree import BACKGROUND
from ringlog.testing import engine

ROOT = Path(__file__).parent.parent.parent
MAIN = "import sys; from ringlog.cli import main; sys.exit(main())"
SOME = pytest.mark.timeout(180)


def test_the_plan_covers_every_stop_point():
    deaths = points.deaths((WAL_SHARD, GATEWAY, SCHEDULER, *BACKGROUND))
    planned = {point for each in deaths.values() for point, _ in each}
    assert planned | {points.SUPERVISOR_POINT, *points.OF_OTHER_LOADS} == set(POINTS)
    assert ("log_after_write", 7) in deaths[WAL_SHARD]
    for spec in points.plan_of(deaths).split(";"):
        configure(spec)
    configure("")


def test_every_planned_stop_point_is_in_the_code_of_its_actor():
    """Otherwise the incarnation never ends. Shards once waited for stop points of the Spark sink."""
    deaths = points.deaths((WAL_SHARD, GATEWAY, SCHEDULER, *BACKGROUND))
    for kind, planned in deaths.items():
        places = [*(ROOT / "actors" / kind).rglob("*.py"), *(ROOT / "ringlog/ring").glob("*.py"),
                  *(ROOT / "ringlog/board").glob("*.py")]  # fmt: skip
        code = "".join(place.read_text() for place in places)
        assert [point for point, _ in planned if f'hit("{point}")' not in code] == [], kind


def test_a_key_that_was_applied_twice_is_reported(tmp_path):
    first, second, reader = (Journal(tmp_path / f"{n}.journal", n) for n in (1, 2, 3))
    first.begin(What.APPEND, 0, values=[KEY_VALUES + 1], digests=[5])
    ops = second.begin(What.APPEND, 0, values=[KEY_VALUES + 1], digests=[5])
    second.end(0, ops, Outcome.OK, 2)
    (op,) = reader.begin(What.FINAL, 0).tolist()
    reader.records(0, op, [1, 2], [KEY_VALUES + 1] * 2, [5, 5])
    reader.end(0, np.array([op], np.uint64), Outcome.OK, 2, 2)
    rows = journal.load(tmp_path)
    assert tried_twice(rows, 0) == 1
    assert len(check_keys(rows, 0)) == 1
    assert "doubled" in judge(rows, ["t"]).wrong
    once = rows[(rows["what"] != What.RECORD) | (rows["seq"] == 2)]
    assert check_keys(once, 0) == []


def test_a_pause_is_the_longest_time_without_a_reply_after_the_kill():
    ms = 1_000_000
    times = np.array([0, 1, 2, 50, 51, 90]) * ms
    assert longest_gap_ms(times, 3 * ms) == 48.0


def test_only_children_of_the_engine_can_be_killed():
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert targets.hold_child(stranger.pid, 1) is None
        assert not targets.kill_child(stranger.pid, 1)
        held = targets.hold_child(stranger.pid, os.getpid())
        assert held is not None
        held.__exit__()
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")


def test_a_failed_wait_reports_its_condition():
    with pytest.raises(Stuck, match="for the moon"):
        wait_for(lambda: False, 0.01, "the moon")


@pytest.mark.parametrize(
    ("wish", "what"),
    [
        ({"kill": ["postgres"]}, "kill must name known processes"),
        ({"kill": []}, "kill must name known processes"),
        ({"url": "ringlog:///run", "kill": ["all"]}, "requires a command that restarts"),
        ({"url": "ringlog://host:1?server_key=" + "a" * 40, "kill": ["gateway"]}, "only on the engine"),
    ],
)
def test_invalid_options_of_the_command_are_refused(wish, what):
    with pytest.raises(UsageError, match=what):
        DrillOptions(**{"url": None, "seconds": 1, "every_s": 1, **wish}).check()


def stage_of(tmp_path, nursery):
    return Stage(Order("kills", 1, 5.0, tmp_path, {}), Account(), nursery)


def storm_in_small(stage):
    """Kill one process of each kind that a client may notice."""
    scene = stage.cast("small")
    scene.make_topics()
    keyed = scene.start_load(1_000.0)
    scene.load.wait_progress(500)
    assert scene.kill(WAL_SHARD, 0)
    assert scene.kill(GATEWAY)
    scene.replace_keyed(keyed[0])
    scene.load.wait_progress(500)
    scene.kill_all()
    scene.load.wait_progress(500)
    stage.close(scene)


@pytest.mark.slow
@SOME
@pytest.mark.night
def test_routers_lose_no_copy_under_kills(tmp_path):
    with Nursery("chaos.rigs.work") as nursery:
        stage = stage_of(tmp_path, nursery)
        stage.run("routers", partial(forwarding.routers, seconds=4.0, passes=(1,)))
    assert stage.account.findings == []
    assert stage.account.counts["kills"] > 0
    assert stage.account.counts["acked"] > 300


@pytest.mark.slow
@SOME
def test_copies_that_differ_from_their_source_are_reported(tmp_path):
    with engine(delivery={"schedulers": 1}) as found, ringlog.connect(found.url) as client:
        client.routers.create("s->d", "s", "d")
        client.append("s", b"1")
        client.routers.settle("s->d", 20)
        scene = SimpleNamespace(engine=found)
        assert forwarding.compare(scene) == []
        client.append("d", b"stray")
        (complaint,) = forwarding.compare(scene)
        assert "1 records, 2 copies" in complaint


@pytest.mark.slow
@SOME
@pytest.mark.night
def test_a_small_storm_of_kills_passes_and_is_counted(tmp_path):
    with Nursery("chaos.rigs.work") as nursery:
        stage = stage_of(tmp_path, nursery)
        stage.run("small", storm_in_small)
    account = stage.account
    assert account.findings == []
    assert account.counts["acked"] > 300
    assert account.counts["records_read"] > 300
    assert account.counts["deletes"] > 0
    assert len(stage.pauses_ms) == 1


BUGS = {
    "repeats are not recognised (mutant 19)": (
        "from ringlog.topic import dedup\ndedup.ProducerHistory.find = lambda self, producer_seq: None\n",
        {"doubled"},
    ),
    "keys are not remembered": (
        "from ringlog.topic import idempotency\n"
        "idempotency.IdempotencyKeys.find = lambda self, key, now_us, window_ms: None\n",
        {"doubled"},
    ),
}


@pytest.mark.slow
@SOME
@pytest.mark.night
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_detected_by_kills(tmp_path, monkeypatch, bug):
    source, kinds = BUGS[bug]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(source)
    monkeypatch.setattr(Engine, "code_first", (str(tmp_path / "code"),))
    with Nursery("chaos.rigs.work") as nursery:
        stage = stage_of(tmp_path, nursery)
        stage.run("planted", killed_before_it_settles)
    assert kinds <= set(stage.total.wrong), stage.account.findings
    assert stage.account.findings


@pytest.mark.slow
@SOME
def test_a_watcher_reports_missing_and_repeated_notifications(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "TOLD_S", 1.0)
    over = SimpleNamespace(is_set=True)
    with engine(delivery={"schedulers": 1}) as found, ringlog.connect(found.url, wait=10) as client:
        for topic in ("a", "b"):
            client.append_many(topic, [b"1", b"2"])
        task = Task(kind="watch", client=1, url=found.url, folder=str(tmp_path), topics=["a", "b"])
        told = Report()
        work._watch(client, task, None, over, told)
        assert (told.errors, told.ops) == ([], 2)
        with client.watch("a") as watch:
            page = watch.next(10)
        reached, twice = {"a": 0}, Report()
        for _ in range(2):
            work._take_told(page, reached, twice)
        assert twice.errors == ["a: told of 1..2 behind 2"]
        monkeypatch.setattr(Delivery, "_accept_grants", lambda self, scheduler, rows: None)
        forgotten = Report()
        work._watch(client, task, None, over, forgotten)
        assert len(forgotten.errors) == 1
        assert "told of {'a': 0, 'b': 0} within 1 s" in forgotten.errors[0]


def killed_before_it_settles(stage):
    """Kill both shards when the log contains records without a sent ack."""
    scene = stage.cast("planted", plan="log_after_publish:9:kill;log_after_publish:9:kill")
    scene.make_topics()
    scene.start_load(1_000.0)
    wait_for(lambda: scene.engine.restarts(WAL_SHARD) == [2, 2], 60.0, "the shards to die twice")
    scene.load.wait_progress(500)
    stage.close(scene)


@pytest.mark.slow
@SOME
def test_the_command_works_on_a_running_engine_and_deletes_its_topics():
    with engine(wal={"shards": 2}, supervisor={"restart_max": 50}) as running:
        command = ["chaos", "--for", "3s", "--every", "500ms", "--kill", "wal_shard", "--json"]
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *command, "--url", running.url],
            capture_output=True, text=True, timeout=150, check=False,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        verdict = json.loads(done.stdout)
        assert verdict["verdict"] == "held"
        assert verdict["kills wal_shard"] >= 1
        assert verdict["acked"] > 100
        assert verdict["read"] > 100
        with ringlog.connect(running.url) as client:
            assert [topic.topic for topic in client.topics.list()] == []
