"""A home of Spark whose Python processes find pyspark with its bytecode.

Spark puts `$SPARK_HOME/python/lib/pyspark.zip` first on the path of every Python process that it starts. In
it is source and no bytecode: each compiles all it imports anew, which takes a first query several seconds of
a processor. Where pyspark was installed by pip it lies there once more, compiled: what the driver imports. So
sessions of this host are started with a home that has all of Spark's but that directory: a few links, kept
in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import site
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

LINKED = ("bin", "conf", "jars", "sbin")
"""What a home needs. `conf` is linked even if it is not there yet."""


@contextmanager
def light_home(environ: MutableMapping[str, str], master: str) -> Iterator[None]:
    """Within it a JVM that is started gets such a home, if `master` is this process's own (`local[...]`).

    Nothing changes where somebody has chosen a SPARK_HOME, where pyspark is not installed in a place that
    every Python process sees, and where the cache cannot be written.
    """
    home = None
    if "SPARK_HOME" not in environ and (master == "local" or master.startswith("local[")):
        package = find_pyspark(environ)
        home = None if package is None else ensure_home(package, cache_of(environ))
    if home is None:
        yield
        return
    environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:
        del environ["SPARK_HOME"]


def find_pyspark(environ: Mapping[str, str], places: Sequence[str] | None = None) -> Path | None:
    """Directory of a pyspark with jars that a Python process finds by itself: it lies in one of the `places`
    of installed packages, or on PYTHONPATH."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    known = [*site.getsitepackages(), site.getusersitepackages()] if places is None else list(places)
    known += [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    has_waited_for_cpu = any(package.parent.resolve() == Path(each).resolve() for each in known)
    return package if has_waited_for_cpu and (package / "jars").is_dir() else None


def cache_of(environ: Mapping[str, str]) -> Path | None:
    """The user's directory for what can be made again."""
    given = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "ringlog"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "ringlog" if os.path.isabs(home) else None


def ensure_home(package: Path, cache: Path | None) -> Path | None:
    """The home for this pyspark, made if it is not there; None where that cannot be."""
    if cache is None:
        return None
    name = hashlib.sha256(os.fsencode(package)).hexdigest()[:16]
    home = cache / f"spark-home-{name}"
    if _is_home_of(home, package):
        return home
    with suppress(OSError):
        _make(home, package)
    return home if _is_home_of(home, package) else None


def _is_home_of(home: Path, package: Path) -> bool:
    return all(_leads_to(home / each, package / each) for each in LINKED)


def _leads_to(link: Path, target: Path) -> bool:
    with suppress(OSError):
        return os.readlink(link) == str(target)
    return False


def _make(home: Path, package: Path) -> None:
    """Link by link: each is put in its place at once, since others may be at it, or work with it."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".spark-home-") as scratch:
        for each in LINKED:
            link = Path(scratch) / each
            link.symlink_to(package / each)
            link.replace(home / each)
