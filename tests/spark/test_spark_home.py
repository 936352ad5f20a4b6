"""The home of Spark that makes its Python processes start fast: where it is made, and where it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringlog.spark.spark_home import LINKED, cache_of, ensure_home, find_pyspark, light_home

pytestmark = [pytest.mark.timeout(180)]


@pytest.fixture
def package(tmp_path):
    found = tmp_path / "site" / "pyspark"
    for each in ("bin", "jars", "sbin", "python"):
        (found / each).mkdir(parents=True)
    return found


def test_it_has_all_of_spark_but_its_python(package, tmp_path):
    home = ensure_home(package, tmp_path / "cache")
    assert sorted(os.listdir(home)) == sorted(LINKED)
    for each in ("bin", "jars", "sbin"):
        assert (home / each).resolve() == package / each
    before = (home / "jars").lstat().st_ino
    assert ensure_home(package, tmp_path / "cache") == home
    assert (home / "jars").lstat().st_ino == before, "what is there is not made again"
    assert os.listdir(tmp_path / "cache") == [home.name]


def test_one_that_is_spoilt_is_mended_and_another_pyspark_has_its_own(package, tmp_path):
    home = ensure_home(package, tmp_path / "cache")
    (home / "jars").unlink()
    (home / "bin").unlink()
    (home / "bin").symlink_to("/nowhere")
    assert ensure_home(package, tmp_path / "cache") == home
    assert (home / "bin").resolve() == package / "bin"
    assert ensure_home(tmp_path / "other", tmp_path / "cache") != home


def test_where_it_cannot_be_made_there_is_none(package, tmp_path):
    (tmp_path / "file").touch()
    assert ensure_home(package, tmp_path / "file" / "cache") is None
    assert ensure_home(package, None) is None
    home = ensure_home(package, tmp_path / "cache")
    (home / "jars").unlink()
    (home / "jars").mkdir()
    assert ensure_home(package, tmp_path / "cache") is None, "what is not ours stays"


def test_it_lies_in_the_users_cache():
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
def test_a_session_of_this_host_is_started_with_it(master, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with light_home(environ, master):
        assert os.listdir(tmp_path / "ringlog") == [os.path.basename(environ["SPARK_HOME"])]
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}, "it is for the JVM alone"


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "spark://host:7077", "sc://host"])
def test_others_are_left_alone(master, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with light_home(environ, master):
        assert "SPARK_HOME" not in environ


def test_a_home_that_somebody_chose_is_used(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path), "SPARK_HOME": "/opt/spark"}
    with light_home(environ, "local[2]"):
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


def test_sparks_python_processes_import_what_is_compiled(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", _WHERE], env={**environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=150,
    )  # fmt: skip
    where = next(line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("found "))
    assert where == str(find_pyspark({}) / "__init__.py")
