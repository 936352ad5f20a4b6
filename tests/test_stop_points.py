"""Stop points: the syntax of a spec, and the effect of each action on a process."""

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


def test_every_stop_point_has_a_description():
    """A description is a sentence of at least four words."""
    assert len(stop_points.POINTS) >= 13
    assert all(len(sentence.split()) >= 4 for sentence in stop_points.POINTS.values())


def test_points_do_nothing_unless_configured():
    stop_points.configure(",".join(f"{name}:1:raise" for name in stop_points.POINTS))
    for name in stop_points.POINTS:
        with pytest.raises(InvariantViolation):
            stop_points.hit(name)
    stop_points.configure("log_after_write:1:raise")
    stop_points.configure("")
    for name in stop_points.POINTS:
        assert stop_points.hit(name) is None


def test_a_point_acts_only_on_its_pass():
    stop_points.configure("log_after_sync:3:raise")
    stop_points.hit("log_after_sync")
    stop_points.hit("log_after_write")
    stop_points.hit("log_after_sync")
    with pytest.raises(InvariantViolation) as caught:
        stop_points.hit("log_after_sync")
    assert caught.value.detail["point"] == "log_after_sync"
    stop_points.hit("log_after_sync")


def test_several_points_and_passes_can_be_armed():
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
def test_an_invalid_spec_is_refused(spec):
    with pytest.raises(ConfigError) as caught:
        stop_points.configure(spec)
    assert caught.value.detail["found"]


def test_a_plan_gives_each_incarnation_its_own_spec():
    plan = "log_after_write:1:kill;;drain_mid:1:kill,log_after_sync:2:exit"
    assert [stop_points.plan_of_incarnation(plan, life) for life in range(1, 6)] == [
        "log_after_write:1:kill", "", "drain_mid:1:kill,log_after_sync:2:exit", "", "",
    ]  # fmt: skip
    assert stop_points.plan_of_incarnation("", 1) == ""


def test_an_unknown_point_in_the_code_raises_if_any_point_is_armed():
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


@pytest.mark.slow
@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_kill_and_exit_end_the_process_at_once(action, status):
    with run(action) as child:
        said, _ = child.communicate(timeout=30)
        assert said == "passed\n"
        assert child.returncode == status


@pytest.mark.slow
def test_a_paused_process_continues_after_sigcont():
    with run("pause") as child:
        assert child.stdout.readline() == "passed\n"
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        child.send_signal(signal.SIGCONT)
        said, _ = child.communicate(timeout=30)
        assert said == "went on\ncleaned up\n"
        assert child.returncode == 0


def hits(source: str) -> set[str]:
    """Return the names that a module passes to `stop_points.hit`; all must be literals."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("stop_points.hit"):
            (name,) = node.args
            assert isinstance(name, ast.Constant), f"line {node.lineno}: a stop point is named by a literal"
            found.add(name.value)
    return found


@pytest.mark.slow
def test_every_point_in_the_code_is_known():
    root = Path(__file__).parent.parent
    files = [*(root / "ringlog").rglob("*.py"), *(root / "actors").rglob("*.py")]
    used = set().union(*(hits(file.read_text()) for file in files))
    assert used, "production code has stop points"
    assert not used - set(stop_points.POINTS)
    assert hits("stop_points.hit('here')\nif x: stop_points.hit('there')") == {"here", "there"}
