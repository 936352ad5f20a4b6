"""Creates a SPARK_HOME whose Python processes import pyspark from compiled bytecode.

Spark puts `$SPARK_HOME/python/lib/pyspark.zip` first on the path of every Python process that it starts. The
zip contains source but no bytecode, so each process compiles its imports. This takes a first query several
seconds of CPU time. If pyspark was installed by pip, its directory also contains the bytecode that the driver
imports. So sessions on this host start with a home that has all parts of Spark except that directory: a few
links in the user's cache.
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
"""Parts of a Spark home that are linked. `conf` is linked even if it does not exist yet."""


@contextmanager
def bytecode_spark_home(environ: MutableMapping[str, str], master: str) -> Iterator[None]:
    """Within the block, start JVMs with such a home, if `master` runs in this process (`local[...]`).

    Does nothing if SPARK_HOME is set, if pyspark is not installed in a place that every Python process
    searches, or if the cache is not writable.
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
    """Return the directory of a pyspark with jars that every Python process finds, or None.

    It must be in one of the `places` of installed packages (default: site-packages), or on PYTHONPATH."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    known = [*site.getsitepackages(), site.getusersitepackages()] if places is None else list(places)
    known += [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    is_importable = any(package.parent.resolve() == Path(each).resolve() for each in known)
    return package if is_importable and (package / "jars").is_dir() else None


def cache_of(environ: Mapping[str, str]) -> Path | None:
    """Return ringlog's cache directory of the user, or None if there is no home directory."""
    given = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "ringlog"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "ringlog" if os.path.isabs(home) else None


def ensure_home(package: Path, cache: Path | None) -> Path | None:
    """Return the home for this pyspark, created if it is missing; None if that is not possible."""
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
    """Create the links one by one.

    Each replaces the old one atomically, because other processes may use it.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".spark-home-") as scratch:
        for each in LINKED:
            link = Path(scratch) / each
            link.symlink_to(package / each)
            link.replace(home / each)
