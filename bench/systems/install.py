"""Install the peers' servers below build/peers without root: `make peers`, with Kafka `make peers MORE=1`.

Redis and beanstalkd are Debian packages, unpacked together with the libraries that the machine lacks. NATS is
built from its Go module, because Debian's 2.9 cannot sync each write. Kafka is its Maven artifacts and needs
Java 17. What is installed already stays as it is; remove build/peers to install it again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.systems.programs import DIRECTORY

DEBIAN = {"redis-server": "usr/bin/redis-server", "beanstalkd": "usr/bin/beanstalkd"}
"""Package and, in it, the program."""
NATS = "github.com/nats-io/nats-server/v2@v2.14.9"
KAFKA = "4.1.2"
VERSIONS = (("redis-server", "--version"), ("beanstalkd", "-v"), ("nats-server", "--version"))
_SHARED = re.compile(r"\.so(\.\d+)*$")
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>peers</groupId><artifactId>kafka</artifactId><version>1</version>
<packaging>pom</packaging><dependencies><dependency>
<groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version>
</dependency></dependencies></project>
"""


class InstallFailed(Exception):
    """A step failed; the text has what it printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install what is missing and print the versions; exit status 1 with the reason when a step fails."""
    parser = argparse.ArgumentParser(prog="bench.systems.install", description=__doc__.splitlines()[0])
    parser.add_argument("--more", action="store_true", help="Kafka as well")
    options = parser.parse_args(arguments)
    try:
        install(DIRECTORY, more=options.more)
    except InstallFailed as e:
        print(e, file=sys.stderr)
        return 1
    for line in versions(DIRECTORY):
        print(line)
    return 0


def install(directory: Path, *, more: bool) -> None:
    """Install the servers that `directory` does not have; raises InstallFailed."""
    (directory / "bin").mkdir(parents=True, exist_ok=True)
    steps: list[tuple[Sequence[str], Callable[[Path, Path], None]]] = [
        (list(DEBIAN), install_debian),
        (["nats-server"], install_nats),
    ]
    if more:
        steps.append((["kafka-server"], install_kafka))
    for programs, step in steps:
        if all((directory / "bin" / program).exists() for program in programs):
            continue
        with tempfile.TemporaryDirectory(prefix="peers-", dir=directory) as scratch:
            step(directory, Path(scratch))


def versions(directory: Path) -> list[str]:
    """What the installed servers call themselves, a line each."""
    found = [
        subprocess.run([directory / "bin" / name, flag], capture_output=True, text=True, check=False).stdout
        for name, flag in VERSIONS
    ]
    jars = [path.stem for path in (directory / "kafka").glob("kafka_*.jar")]
    return [text.strip() for text in (*found, *jars)]


def install_debian(directory: Path, scratch: Path) -> None:
    """Unpack the packages, and packages that they need and the machine lacks, into one tree."""
    require("apt-get", "Debian packages")
    # Package lists of its own: those of the machine need root to be brought up to date.
    for name in ("state/lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True)
    apt = ["apt-get", "-q", "-o", f"Dir::State={scratch}/state", "-o", f"Dir::Cache={scratch}/cache"]
    apt += ["-o", "Dir::State::status=/var/lib/dpkg/status"]
    if os.geteuid() == 0:
        apt += ["-o", "APT::Sandbox::User=root"]
    run([*apt, "update"], scratch)
    planned = run([*apt, "-s", "--no-install-recommends", "install", "--reinstall", *DEBIAN], scratch)
    run([*apt, "download", *packages_of(planned)], scratch)
    root = scratch / "root"
    for package in sorted(scratch.glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(root)], scratch)
    final = directory / "debian"
    shutil.rmtree(final, ignore_errors=True)
    root.rename(final)
    for name, path in DEBIAN.items():
        libraries = [f"$here/debian/{top}" for top in library_directories(final)]
        write_script(
            directory / "bin" / name,
            f'LD_LIBRARY_PATH="{":".join(libraries)}" exec "$here/debian/{path}" "$@"',
        )


def packages_of(planned: str) -> list[str]:
    """Return name=version of each package in the output of `apt-get -s install`."""
    return [f"{name}={version}" for name, version in re.findall(r"^Inst (\S+) .*?\((\S+) ", planned, re.M)]


def library_directories(root: Path) -> list[str]:
    """Directories of shared libraries below `root`, relative to it."""
    found = {path.parent.relative_to(root) for path in root.rglob("*.so*") if _SHARED.search(path.name)}
    return sorted(str(path) for path in found)


def install_nats(directory: Path, scratch: Path) -> None:
    """Build it with Go, and keep nothing of what that downloads."""
    require("go", "NATS")
    variables = {"GOBIN": scratch / "bin", "GOMODCACHE": scratch / "modules", "GOCACHE": scratch / "cache"}
    environ = {name: str(path) for name, path in variables.items()}
    run(["go", "install", "-modcacherw", NATS], scratch, {**environ, "CGO_ENABLED": "0"})
    (scratch / "bin" / "nats-server").rename(directory / "bin" / "nats-server")


def install_kafka(directory: Path, scratch: Path) -> None:
    """Fetch its jars with Maven. `kafka-server CLASS ARGUMENTS` runs one of its programs."""
    require("mvn", "Kafka")
    require("java", "Kafka")
    (scratch / "pom.xml").write_text(_POM.format(version=KAFKA))
    jars = scratch / "jars"
    run(
        ["mvn", "-q", "-B", f"-Dmaven.repo.local={scratch / 'repository'}", "dependency:copy-dependencies",
         "-DincludeScope=runtime", f"-DoutputDirectory={jars}"],
        scratch,
    )  # fmt: skip
    final = directory / "kafka"
    shutil.rmtree(final, ignore_errors=True)
    jars.rename(final)
    write_script(directory / "bin" / "kafka-server", 'exec java $KAFKA_JAVA_OPTIONS -cp "$here/kafka/*" "$@"')


def require(tool: str, what: str) -> None:
    """Raise InstallFailed when the machine lacks a tool."""
    if shutil.which(tool) is None:
        raise InstallFailed(f"{what} cannot be installed: {tool} is missing")


def run(command: Sequence[str], cwd: Path, environ: dict[str, str] | None = None) -> str:
    """Run a step and return what it printed; raises InstallFailed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environ or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise InstallFailed(f"{shlex.join(command)} failed:\n{done.stdout[-2_000:]}")
    return done.stdout


def write_script(path: Path, line: str) -> None:
    """Write an executable script; `$here` in `line` is the peers' directory, also through a symbolic link."""
    path.write_text(f'#!/bin/sh\nhere=$(dirname "$(dirname "$(readlink -f "$0")")")\n{line}\n')
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
