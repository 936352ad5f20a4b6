"""Stop points: what a spec says, and what each action really does to a process."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringlog import stop_points
from ringlog.errors import ConfigError, InvariantViolation


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    stop_points.configure("")


def test_every_point_says_what_is_true_there():
    """FH-6."""
    assert len(stop_points.POINTS) >= 13
    assert all(len(sentence.split()) >= 4 for sentence in stop_points.POINTS.values())


def test_points_do_nothing_unless_configured():
    for name in stop_points.POINTS:
        stop_points.hit(name)
    stop_points.configure("log_after_write:1:raise")
    stop_points.configure("")
    stop_points.hit("log_after_write")


def test_a_point_acts_on_its_pass_and_on_no_other():
    stop_points.configure("log_after_sync:3:raise")
    stop_points.hit("log_after_sync")
    stop_points.hit("log_after_write")
    stop_points.hit("log_after_sync")
    with pytest.raises(InvariantViolation) as caught:
        stop_points.hit("log_after_sync")
    assert caught.value.detail["point"] == "log_after_sync"
    stop_points.hit("log_after_sync")


def test_several_points_and_passes_may_be_armed():
    stop_points.configure(" log_after_write:1:raise, drain_mid:2:raise ,log_after_write:2:raise,")
    stop_points.hit("drain_mid")
    for name in ("log_after_write", "log_after_write", "drain_mid"):
        with pytest.raises(InvariantViolation):
            stop_points.hit(name)


@pytest.mark.parametrize(
    "spec",
    [
        "nowhere:1:kill", "log_after_write", "log_after_write:1", "log_after_write:1:kill:2",
        "log_after_write:0:kill", "log_after_write:-1:kill", "log_after_write:x:kill",
        "log_after_write:²:kill",
        "log_after_write::kill", "log_after_write:1:explode", "drain_mid:1:kill,nowhere:1:kill",
    ],
)  # fmt: skip
def test_a_spec_that_makes_no_sense_is_refused(spec):
    with pytest.raises(ConfigError) as caught:
        stop_points.configure(spec)
    assert caught.value.detail["found"]


def test_a_plan_for_several_lives_gives_each_its_own_and_the_rest_none():
    plan = "log_after_write:1:kill;;drain_mid:1:kill,log_after_sync:2:exit"
    assert [stop_points.plan_of_incarnation(plan, life) for life in range(1, 6)] == [
        "log_after_write:1:kill", "", "drain_mid:1:kill,log_after_sync:2:exit", "", "",
    ]  # fmt: skip
    assert stop_points.plan_of_incarnation("", 1) == ""


def test_an_unknown_name_in_the_code_is_found_by_any_test_that_arms_a_point():
    stop_points.configure("drain_mid:1:raise")
    with pytest.raises(InvariantViolation):
        stop_points.hit("log_after_lunch")


PROGRAM = """
import atexit, sys
from ringlog import stop_points
atexit.register(lambda: print("cleaned up", flush=True))
stop_points.configure(sys.argv[1])
stop_points.hit("log_after_write")
print("passed", flush=True)
stop_points.hit("log_after_write")
print("went on", flush=True)
"""


def run(action: str) -> subprocess.Popen[str]:
    spec = f"log_after_write:2:{action}"
    return subprocess.Popen([sys.executable, "-c", PROGRAM, spec], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_kill_and_exit_end_the_process_where_it_stands(action, status):
    with run(action) as child:
        said, _ = child.communicate(timeout=30)
        assert said == "passed\n"
        assert child.returncode == status


def test_a_paused_process_goes_on_when_told():
    with run("pause") as child:
        assert child.stdout.readline() == "passed\n"
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        child.send_signal(signal.SIGCONT)
        said, _ = child.communicate(timeout=30)
        assert said == "went on\ncleaned up\n"
        assert child.returncode == 0


def hits(source: str) -> set[str]:
    """Names a module passes to `stop_points.hit`, all of which must be spelled out."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("stop_points.hit"):
            (name,) = node.args
            assert isinstance(name, ast.Constant), f"line {node.lineno}: a stop point is named by a literal"
            found.add(name.value)
    return found


def test_every_point_in_the_code_is_a_known_one():
    root = Path(__file__).parent.parent
    files = [*(root / "ringlog").rglob("*.py"), *(root / "actors").rglob("*.py")]
    used = set().union(*(hits(file.read_text()) for file in files))
    assert used, "production code has stop points"
    assert not used - set(stop_points.POINTS)
    assert hits("stop_points.hit('here')\nif x: stop_points.hit('there')") == {"here", "there"}
