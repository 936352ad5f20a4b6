"""Servers of peer systems: their packages, how they are found, and the error for a missing one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.systems import install
from bench.systems.install import InstallFailed, library_directories, packages_of, write_script
from bench.systems.programs import PeerMissing, module, program

PLANNED = """\
Reading package lists...
Inst libjemalloc2 (5.3.0-1 Debian:12.15/oldstable [amd64])
Inst redis-server [5:7.0.14-1] (5:7.0.15-1~deb12u10 Debian-Security:12/oldstable-security [amd64])
Conf libjemalloc2 (5.3.0-1 Debian:12.15/oldstable [amd64])
"""


def test_packages_are_the_ones_that_apt_would_install() -> None:
    assert packages_of(PLANNED) == ["libjemalloc2=5.3.0-1", "redis-server=5:7.0.15-1~deb12u10"]


def test_only_directories_of_shared_libraries_are_on_the_library_path(tmp_path: Path) -> None:
    for name in ("usr/lib/x/libz.so.1.2", "usr/lib/systemd/redis.socket", "usr/bin/tool"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert library_directories(tmp_path) == ["usr/lib/x"]


def test_a_script_finds_its_files_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "peers" / "bin").mkdir(parents=True)
    write_script(tmp_path / "peers" / "bin" / "where", 'echo "$here" "$@"')
    (tmp_path / "link").symlink_to(tmp_path / "peers")
    done = subprocess.run(
        [tmp_path / "link" / "bin" / "where", "a b"], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == f"{tmp_path / 'peers'} a b\n"


def test_a_program_of_make_peers_takes_precedence_over_the_system(tmp_path: Path) -> None:
    assert program("sh", tmp_path).endswith("/sh")
    (tmp_path / "bin").mkdir()
    write_script(tmp_path / "bin" / "sh", "true")
    assert program("sh", tmp_path) == str(tmp_path / "bin" / "sh")


@pytest.mark.parametrize(
    ("name", "said"), [("nats-server", "run `make peers`$"), ("kafka-server", "run `make peers MORE=1`$")]
)
def test_a_missing_server_is_an_error_that_names_make_peers(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerMissing, match=f"{name} is not installed: {said}"):
        program(name, tmp_path)


def test_a_missing_client_is_an_error_that_names_make_peers() -> None:
    with pytest.raises(PeerMissing, match="make peers"):
        module("no_such_client")


def test_a_failed_step_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed, match="no luck"):
        install.run(["sh", "-c", "echo no luck; exit 3"], tmp_path)


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallFailed, match="NATS cannot be installed: go is missing"):
        install.install_nats(tmp_path, tmp_path)


def test_installed_programs_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in (*install.DEBIAN, "nats-server", "kafka-server"):
        write_script(tmp_path / "bin" / name, "true")
    monkeypatch.setattr(install, "run", lambda *_: pytest.fail("a step was run"))
    install.install(tmp_path, more=True)
