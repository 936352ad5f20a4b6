"""Compiles the JVM reader into a jar in the user's cache, when a session is first started with it.

The package contains the source (`jvm/`). The JDK whose Java runs Spark compiles it. With a plain Java runtime
there is no compiler: sessions then work without the JVM reader, and reading costs more CPU time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ringlog import environment
from ringlog.spark.spark_home import cache_of

log: logging.Logger = logging.getLogger("ringlog.spark")

SOURCES = Path(__file__).parent / "jvm"
SERVICE = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
PROVIDER = "ringlog.spark.RinglogSource"
RELEASE = "17"
"""Oldest Java that Spark 4 supports. A jar from a newer JDK also runs there with this release setting."""
COMPILE_S = 120.0
SWITCH = environment.SPARK_JVM
"""If this environment variable is 0, sessions start without the JVM reader."""


def reader_jar(java_home: str, environ: Mapping[str, str]) -> Path | None:
    """Return the jar for this interpreter's pyspark, compiled if needed; None if not possible."""
    package, cache = _pyspark(), cache_of(environ)
    if package is None or cache is None or environ.get(SWITCH) == "0":
        return None
    jar = cache / f"spark-reader-{_fingerprint(package)}.jar"
    if jar.is_file():
        return jar
    javac = Path(java_home) / "bin" / "javac"
    if not javac.is_file():
        return None
    try:
        _make(jar, javac, package)
    except (OSError, subprocess.SubprocessError) as e:
        # Spark's internal classes may differ in an unknown release.
        log.warning("the reader for the JVM was not compiled, so reading costs more: %s", _reason(e))
        return None
    return jar


def jvm_reader() -> str | None:
    """Return the path of the jar, for `spark.jars` of your own session; None if it cannot be compiled.

    Sessions from `ringlog.spark.session` already have it. Raises JavaMissing if no Java is installed.
    """
    from ringlog.spark.jre import provide_java

    jar = reader_jar(provide_java(os.environ), os.environ)
    return None if jar is None else str(jar)


def _pyspark() -> Path | None:
    spec = find_spec("pyspark")
    package = None if spec is None or spec.origin is None else Path(spec.origin).parent
    return package if package is not None and (package / "jars").is_dir() else None


def _fingerprint(package: Path) -> str:
    """Hash the inputs of the jar: its source, and the Spark jars that it is compiled against."""
    found = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.java")):
        found.update(source.read_bytes())
    for jar in sorted((package / "jars").glob("spark-*.jar")):
        found.update(jar.name.encode())
    return found.hexdigest()[:16]


def _make(jar: Path, javac: Path, package: Path) -> None:
    jar.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=jar.parent, prefix=".spark-reader-") as scratch:
        classes = Path(scratch) / "classes"
        sources = [str(each) for each in sorted(SOURCES.glob("*.java"))]
        subprocess.run(
            [
                str(javac), "--release", RELEASE, "-proc:none", "-nowarn", "-implicit:none",
                "-cp", str(package / "jars" / "*"), "-d", str(classes), *sources,
            ],
            check=True, capture_output=True, text=True, timeout=COMPILE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        made = Path(scratch) / "made.jar"
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
            for each in sorted(classes.rglob("*.class")):
                out.write(each, each.relative_to(classes))
            out.writestr(SERVICE, PROVIDER + "\n")
        # Atomic: another process may compile at the same time, or use the old jar.
        made.replace(jar)


def _reason(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    with suppress(IndexError):
        return str(text).strip().splitlines()[0]
    return type(error).__name__


def with_jar(settings: dict[str, str], jar: Path | None) -> dict[str, str]:
    """Return session settings with the jar added to `spark.jars`."""
    if jar is None:
        return settings
    named = [each for each in settings.get("spark.jars", "").split(",") if each]
    return {**settings, "spark.jars": ",".join([*named, os.fspath(jar)])}
