"""The Spark home that makes Spark's Python processes start fast: where it is created and where it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringlog.spark.spark_home import LINKED, bytecode_spark_home, cache_of, ensure_home, find_pyspark

pytestmark = [pytest.mark.timeout(180)]


@pytest.fixture
def package(tmp_path):
    found = tmp_path / "site" / "pyspark"
    for each in ("bin", "jars", "sbin", "python"):
        (found / each).mkdir(parents=True)
    return found


def test_the_home_links_all_of_spark_except_python(package, tmp_path):
    home = ensure_home(package, tmp_path / "cache")
    assert sorted(os.listdir(home)) == sorted(LINKED)
    for each in ("bin", "jars", "sbin"):
        assert (home / each).resolve() == package / each
    before = (home / "jars").lstat().st_ino
    assert ensure_home(package, tmp_path / "cache") == home
    assert (home / "jars").lstat().st_ino == before, "what is there is not made again"
    assert os.listdir(tmp_path / "cache") == [home.name]


def test_a_broken_home_is_repaired_and_another_pyspark_gets_its_own(package, tmp_path):
    home = ensure_home(package, tmp_path / "cache")
    (home / "jars").unlink()
    (home / "bin").unlink()
    (home / "bin").symlink_to("/nowhere")
    assert ensure_home(package, tmp_path / "cache") == home
    assert (home / "bin").resolve() == package / "bin"
    assert ensure_home(tmp_path / "other", tmp_path / "cache") != home


def test_ensure_home_returns_none_if_it_cannot_create_the_home(package, tmp_path):
    (tmp_path / "file").touch()
    assert ensure_home(package, tmp_path / "file" / "cache") is None
    assert ensure_home(package, None) is None
    home = ensure_home(package, tmp_path / "cache")
    (home / "jars").unlink()
    (home / "jars").mkdir()
    assert ensure_home(package, tmp_path / "cache") is None, "what is not ours stays"


def test_the_home_is_in_the_users_cache_directory():
    assert str(cache_of({"HOME": "/home/u"})) == "/home/u/.cache/ringlog"
    assert str(cache_of({"HOME": "/home/u", "XDG_CACHE_HOME": "/c"})) == "/c/ringlog"
    assert str(cache_of({"HOME": "/home/u", "XDG_CACHE_HOME": "not/absolute"})) == "/home/u/.cache/ringlog"
    assert cache_of({}) is None


def test_only_a_pyspark_that_every_process_finds_is_used():
    found = find_pyspark({})
    assert found is not None
    assert (found / "jars").is_dir()
    assert find_pyspark({}, places=[]) is None
    assert find_pyspark({"PYTHONPATH": f"/elsewhere{os.pathsep}{found.parent}"}, places=[]) == found


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]"])
def test_a_local_session_starts_with_the_home(master, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with bytecode_spark_home(environ, master):
        assert os.listdir(tmp_path / "ringlog") == [os.path.basename(environ["SPARK_HOME"])]
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}, "it is for the JVM alone"


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "spark://host:7077", "sc://host"])
def test_a_session_on_a_cluster_does_not_use_the_home(master, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with bytecode_spark_home(environ, master):
        assert "SPARK_HOME" not in environ


def test_a_configured_spark_home_is_kept(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path), "SPARK_HOME": "/opt/spark"}
    with bytecode_spark_home(environ, "local[2]"):
        assert environ["SPARK_HOME"] == "/opt/spark"
    assert environ["SPARK_HOME"] == "/opt/spark"


_WHERE = """
import ringlog.spark
from pyspark.sql.functions import udf

def where(_):
    import pyspark
    return pyspark.__file__

with_session = ringlog.spark.session("where", master="local[1]")
print("found", with_session.range(1).select(udf(where)("id")).first()[0])
with_session.stop()
"""


@pytest.mark.slow
def test_sparks_python_processes_import_the_installed_pyspark(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", _WHERE], env={**environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=150,
    )  # fmt: skip
    where = next(line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("found "))
    assert where == str(find_pyspark({}) / "__init__.py")
