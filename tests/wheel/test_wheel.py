"""The wheel as a user installs it: its contents, and an engine, a worker and a pytest fixture that run
from it.

`make test-wheel` builds the wheel and runs this. The environment has the dependencies of the checkout's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "wheel"
TOP_LEVEL = {"pyspark_ringlog", "ringlog", "supervisor.py"}

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def wheel() -> Path:
    [found] = WHEELS.glob("ringlog-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, beside a package `supervisor` as PyPI has one."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    [site] = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables of a program with a package of its own named `actors`."""
    own = tmp_path / "own" / "actors"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise RuntimeError('the user has an own package actors')\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RINGLOG_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(own.parent)}


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


def run(python: Path, *arguments: str, cwd: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [str(python), *arguments],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_only_its_own_names_at_the_top(wheel: Path):
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == TOP_LEVEL


def test_the_description_has_no_link_to_a_file_of_the_checkout(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "ringlog serve" in text, "the README is its body"
    assert re.findall(r"\]\((?!https?:)", text) == []


def test_the_wheel_has_compiled_modules_for_this_interpreter(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for module in (
        "ringlog/topic/state",
        "ringlog/actors/wal_shard/core",
        "ringlog/client/connection/session",
    ):
        assert f"{module}{suffix}" in names
    assert any(name.startswith("ringlog/_kernel.") and name.endswith(".so") for name in names)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in wheel.name


def test_the_installed_client_is_compiled(python: Path, work_dir: Path, environ: dict[str, str]):
    code = "import ringlog.client.connection.shell as m; print(m.__file__.endswith('.so'))"
    assert run(python, "-c", code, cwd=work_dir, environ=environ).strip() == "True"


PROGRAM = """
    import os, signal, subprocess, sys
    import ringlog

    serve = [os.path.join(os.path.dirname(sys.executable), "ringlog"), "serve", "--data-dir", "data"]
    if os.geteuid() == 0:
        serve += ["--set", "run.allow_root=true"]
    engine = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = ringlog.connect(f"ringlog://{os.getcwd()}/data/run", wait=30)
        client.topics.create("emails", type="queue")
        client.topics.create("delivered")
        for n in range(3):
            client.queue("emails").put(b"%d" % n)
        command = os.path.join(os.path.dirname(sys.executable), "ringlog")
        worker = [command, "worker", "tasks:deliver", "--queue", "emails"]
        os.environ["RINGLOG_URL"] = f"ringlog://{os.getcwd()}/data/run"
        work = subprocess.Popen(worker, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        reader = iter(client.reader("delivered", follow=True))
        print(sorted(next(reader).data for _ in range(3)))
        work.send_signal(signal.SIGTERM)
        assert work.wait(40) == 0
        client.close()
    finally:
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(40) == 0
"""
TASKS = """
    import ringlog

    client = ringlog.connect()


    def deliver(data):
        client.append("delivered", data)
"""


def test_an_engine_and_a_worker_run_from_the_wheel(python: Path, work_dir: Path, environ: dict[str, str]):
    (work_dir / "tasks.py").write_text(textwrap.dedent(TASKS))
    code = textwrap.dedent(PROGRAM)
    assert run(python, "-c", code, cwd=work_dir, environ=environ).strip() == "[b'0', b'1', b'2']"


TEST = """
    import ringlog

    def test_it(ringlog_engine):
        with ringlog.connect(ringlog_engine.url, wait=20) as client:
            assert client.append("t", b"x").first_seq == 1
"""


def test_the_pytest_fixture_runs_from_the_wheel(python: Path, work_dir: Path, environ: dict[str, str]):
    (work_dir / "test_it.py").write_text(textwrap.dedent(TEST))
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=work_dir, environ=environ)
    assert "1 passed" in out


@pytest.fixture
def with_supervisor(python: Path) -> Iterator[None]:
    """A package named `supervisor`, as PyPI has one, beside ours."""
    [site] = python.parents[1].glob("lib/python*/site-packages")
    other = site / "supervisor"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the supervisor of PyPI')\n")
    yield
    (other / "__init__.py").unlink()
    for left in sorted(other.rglob("*"), reverse=True):
        left.unlink() if left.is_file() else left.rmdir()
    other.rmdir()


@pytest.mark.usefixtures("with_supervisor")
def test_serve_and_the_fixture_do_not_need_the_name_supervisor(
    python: Path, work_dir: Path, environ: dict[str, str]
):
    test_an_engine_and_a_worker_run_from_the_wheel(python, work_dir, environ)
    test_the_pytest_fixture_runs_from_the_wheel(python, work_dir, environ)


def test_a_drill_with_kills_runs_from_the_wheel(python: Path, work_dir: Path, environ: dict[str, str]):
    """`ringlog chaos` once needed a checkout."""
    command = ["chaos", "--for", "3s", "--every", "500ms", "--kill", "wal_shard,gateway", "--json"]
    found = json.loads(run(python, "-m", "ringlog", *command, cwd=work_dir, environ=environ))
    assert found["verdict"] == "held"
    assert found["kills wal_shard"] >= 1
    assert found["acked"] > 100
