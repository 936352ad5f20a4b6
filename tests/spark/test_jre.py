"""The Java that Spark uses: the machine's or the packaged one, and the argument that the wrapper removes."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path

import pytest

from ringlog.spark import jre
from ringlog.spark.errors import JavaMissing


def java(home: Path, version: str | None = "21.0.8", script: str = "exit 0") -> Path:
    """Create a runtime: `bin/java` runs `script`, and `release` contains the version."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    if version is not None:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


def test_java_home_takes_precedence_over_path(tmp_path: Path) -> None:
    named, on_path = java(tmp_path / "named"), java(tmp_path / "path")
    environ = {"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}
    before = dict(environ)
    assert jre.provide_java(environ, tmp_path / "packaged") == str(named)
    assert environ == before


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.8", "25", None])
def test_java_on_the_path_is_found_through_links(tmp_path: Path, version: str | None) -> None:
    home = java(tmp_path / "home", version)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert jre.provide_java({"PATH": str(tmp_path / "bin")}, tmp_path / "packaged") == str(home)


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.22"])
def test_the_packaged_java_replaces_a_too_old_one(tmp_path: Path, version: str) -> None:
    old, packaged = java(tmp_path / "old", version), java(tmp_path / "packaged")
    environ = {"JAVA_HOME": str(old), "PATH": ""}
    assert jre.provide_java(environ, packaged) == str(packaged)
    assert environ["JAVA_HOME"] == str(jre.WRAPPER_HOME)
    # A second session of the same process finds the same Java.
    assert jre.provide_java(environ, packaged) == str(packaged)


def test_without_java_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jre, "PACKAGE", "no_such_package_of_java")
    old = java(tmp_path / "old", "11")
    with pytest.raises(JavaMissing, match="spark-jre") as caught:
        jre.provide_java({"JAVA_HOME": str(old)})
    assert "11" in str(pickle.loads(pickle.dumps(caught.value)).detail["too_old"])


@pytest.mark.slow
def test_the_wrapper_removes_one_argument_and_keeps_the_others(tmp_path: Path) -> None:
    packaged = java(tmp_path / "a place", script='printf "<%s>" "$@"')
    environ = {"PATH": os.environ["PATH"]}
    environ.pop("JAVA_HOME", None)
    environ["PATH"] = str(tmp_path)  # no Java here
    jre.provide_java(environ, packaged)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Da=b c", "", "--add-modules=java.sql", "*"]
    done = subprocess.run(
        [f"{environ['JAVA_HOME']}/bin/java", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "<-Xmx1g><-Da=b c><><--add-modules=java.sql><*>"
