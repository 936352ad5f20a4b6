"""The jar of the JVM reader: compiled once for each Spark version, and not used where it cannot be
compiled."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from ringlog.spark import jvm_jar
from ringlog.spark.jvm_jar import PROVIDER, SERVICE, reader_jar, with_jar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def home():
    """The home of a JDK on this machine."""
    javac = shutil.which("javac")
    if javac is None:
        pytest.skip("no javac on this machine")
    return str(Path(javac).resolve().parent.parent)


@pytest.fixture
def environ(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_jar_is_compiled_once_and_registers_its_source(home, environ):
    jar = reader_jar(home, environ)
    with zipfile.ZipFile(jar) as found:
        assert found.read(SERVICE).decode().strip() == PROVIDER
        assert f"{PROVIDER.replace('.', '/')}.class" in found.namelist()
    made = jar.stat()
    assert reader_jar("/no/java/needed/any/more", environ) == jar
    assert jar.stat().st_ino == made.st_ino
    assert os.listdir(jar.parent) == [jar.name], "nothing is left of the making"


def test_the_reader_compiles_without_a_warning(home, tmp_path):
    sources = sorted(str(each) for each in jvm_jar.SOURCES.glob("*.java"))
    done = subprocess.run(
        [
            f"{home}/bin/javac", "--release", jvm_jar.RELEASE, "-Xlint:all,-path,-classfile", "-Werror",
            "-proc:none", "-cp", str(jvm_jar._pyspark() / "jars" / "*"), "-d", str(tmp_path), *sources,
        ],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_another_source_gets_its_own_jar(home, environ, tmp_path, monkeypatch):
    first = reader_jar(home, environ)
    other = tmp_path / "jvm"
    shutil.copytree(jvm_jar.SOURCES, other)
    with (other / "Xxh3.java").open("a") as out:
        out.write("// another\n")
    monkeypatch.setattr(jvm_jar, "SOURCES", other)
    assert reader_jar(home, environ) != first


def test_without_a_compiler_or_a_cache_or_if_disabled_there_is_no_jar(home, environ, tmp_path):
    assert reader_jar(str(tmp_path), environ) is None
    assert reader_jar(home, {}) is None
    assert reader_jar(home, environ | {jvm_jar.SWITCH: "0"}) is None
    taken = tmp_path / "file"
    taken.write_bytes(b"")
    assert reader_jar(home, {"XDG_CACHE_HOME": str(taken)}) is None


def test_a_failed_compilation_is_logged_and_gives_no_jar(home, environ, tmp_path, monkeypatch, caplog):
    bad = tmp_path / "jvm"
    bad.mkdir()
    (bad / "A.java").write_text("class A extends org.apache.spark.NoSuchThing {}\n")
    monkeypatch.setattr(jvm_jar, "SOURCES", bad)
    with caplog.at_level(logging.WARNING, "ringlog.spark"):
        assert reader_jar(home, environ) is None
    assert "cannot find symbol" in caplog.text
    assert not list(Path(environ["XDG_CACHE_HOME"]).rglob("*.jar"))


def test_with_jar_keeps_the_configured_jars():
    assert with_jar({"spark.jars": "/a.jar,/b.jar"}, Path("/c.jar")) == {"spark.jars": "/a.jar,/b.jar,/c.jar"}
    assert with_jar({}, Path("/c.jar")) == {"spark.jars": "/c.jar"}
    assert with_jar({"x": "y"}, None) == {"x": "y"}
