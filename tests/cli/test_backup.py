"""`ringlog backup` of a running engine, `restore`, and a start of the restored data: every record is
compared.

The files that a checkpoint names are a consistent copy.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import ringlog
from ringlog.cli.app import run
from ringlog.cli.backup import BackupJob, copy_running
from ringlog.cli.copies import MANIFEST, changed_files, read_manifest
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.client import Client
from ringlog.client.read.pages import Cursor
from ringlog.client.write.fields import NewRecord
from ringlog.link.curve import key_file_text, new_key
from ringlog.spark.clients import log_id_of
from ringlog.spark.offsets import CheckpointRefused, decode, encode
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.real_engine import TestEngine, engine, wait_until
from ringlog.testing.wrapped_disk import WrappedDisk
from ringlog.verify.directory import verify_directory
from tests.support.engines import engine_fixture
from tests.support.machine import free_port, private_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
TOPICS = ("fast", "slow", "many.a", "many.b", "many.c")

running = engine_fixture(wal={"shards": 2, "file_bytes": 1 << 20}, storage={"enabled": True})


def fill(client: Client) -> None:
    for topic in TOPICS:
        client.topics.create(topic, durability="fsync", exist_ok=True)
        made = [NewRecord(data=b"%s %d" % (topic.encode(), i), tag=f"t{i % 7}") for i in range(3_000)]
        for start in range(0, 3_000, 500):
            client.append_many(topic, made[start : start + 500])


def contents(client: Client) -> dict[str, list[tuple[int, int, bytes, str | None]]]:
    """Return every record of every topic, without tombstones."""
    found: dict[str, list[tuple[int, int, bytes, str | None]]] = {}
    for topic in TOPICS:
        pages = client.reader(topic).pages(1_000)
        found[topic] = [(r.seq, r.ts, r.data, r.tag) for page in pages for r in page.records]
    return found


def test_a_backup_of_a_running_engine_restores_every_record(
    running: TestEngine, tmp_path: Path, capsys
) -> None:
    """A writer is active all the time. The backup contains everything that was acknowledged before it
    began."""
    with ringlog.connect(running.url, wait=10) as client:
        fill(client)
        client.topics.delete_records("slow", match="t3")
        client.topics.configure("many.a", cap_records=1_000)
        before = contents(client)
        ended = threading.Event()

        def go_on() -> None:
            with ringlog.connect(running.url, wait=10) as other:
                while not ended.is_set():
                    other.append("fast", b"later")

        writer = threading.Thread(target=go_on)
        writer.start()
        try:
            backup = tmp_path / "backup"
            assert run(["backup", "--to", str(backup), "--url", running.url]) == CliExit.DONE, (
                capsys.readouterr()
            )
        finally:
            ended.set()
            writer.join()
    running.stop()
    shutil.rmtree(running.data_dir)
    assert run(["restore", str(backup), "--to", running.data_dir]) == CliExit.DONE
    assert not verify_directory(running.data_dir, is_deep=True).is_damaged
    running.start()
    with ringlog.connect(running.url, wait=10) as client:
        after = contents(client)
        for topic in TOPICS:
            assert after[topic][: len(before[topic])] == before[topic], topic
            more = after[topic][len(before[topic]) :]
            assert {record[2] for record in more} <= {b"later"}
            seqs = [record[0] for record in more]
            assert seqs == list(range(3_001, 3_001 + len(seqs)))
        assert client.append("fast", b"goes on").first_seq == after["fast"][-1][0] + 1


def test_each_restore_is_another_log_of_the_same_engine(running: TestEngine, tmp_path: Path) -> None:
    """Its positions are given to other records. Checkpoints and archives of the log before are refused."""
    data, backup = Path(running.data_dir), tmp_path / "backup"
    path = str(data)
    before, logs = running.info.engine_id, [log_id_of(path)]
    with ringlog.connect(running.url, wait=10) as client:
        fill(client)
    assert run(["backup", "--to", str(backup), "--url", running.url]) == CliExit.DONE
    checkpoint = encode(logs[0], {"fast": Cursor(1, 3_005)})
    for _ in range(2):
        running.stop()
        shutil.rmtree(data)
        assert run(["restore", str(backup), "--to", path]) == CliExit.DONE
        running.start()
        with pytest.raises(CheckpointRefused, match="restored from a backup"):
            decode(checkpoint, log_id_of(path))
        logs.append(log_id_of(path))
        assert running.info.engine_id == before
    running.restart()
    assert log_id_of(path) == logs[-1]
    assert len(set(logs)) == 3


class InterruptedDisk(WrappedDisk):
    """Calls `interrupt` before each attempt of a backup creates its first data part."""

    def __init__(self, backup: Path, interrupt: Callable[[], None]) -> None:
        super().__init__(RealDisk())
        self.backup, self.interrupt = backup, interrupt
        self.interrupts = 0

    def create(self, path: str) -> int:
        if path.endswith(".data") and not list(self.backup.rglob("*.data")):
            self.interrupts += 1
            self.interrupt()
        return super().create(path)


def test_a_backup_outlasts_any_number_of_checkpoints(running: TestEngine, tmp_path: Path) -> None:
    """The checkpoints delete every log file and snapshot that the backup was to copy."""
    backup, data = tmp_path / "backup", Path(running.data_dir)
    names = ("wal/*/*.log", "meta/snapshot-*")

    def short_lived() -> set[Path]:
        return {path for name in names for path in data.glob(name)}

    with ringlog.connect(running.url, wait=10) as client:
        fill(client)
        before = contents(client)

        def make_checkpoints() -> None:
            was = short_lived()
            for _ in range(4):
                for topic in TOPICS:
                    client.append(topic, b"later")
                assert run(["checkpoint", "--url", running.url]) == CliExit.DONE
            assert not was & short_lived(), "all files of the first checkpoint are gone"

        disk = InterruptedDisk(backup, make_checkpoints)
        made = copy_running(Options(url=running.url), BackupJob(data, backup, "", is_online=True, disk=disk))
    assert disk.interrupts == 1, "no second attempt was necessary"
    assert (made, []) == (read_manifest(backup), changed_files(backup, made.files))
    running.stop()
    shutil.rmtree(data)
    assert run(["restore", str(backup), "--to", str(data)]) == CliExit.DONE
    assert not verify_directory(str(data), is_deep=True).is_damaged
    running.start()
    with ringlog.connect(running.url, wait=10) as client:
        assert contents(client) == before


def test_a_stopped_engine_is_backed_up_without_a_start(running: TestEngine, tmp_path: Path) -> None:
    with ringlog.connect(running.url, wait=10) as client:
        fill(client)
        before = contents(client)
    assert run(["checkpoint", "--url", running.url]) == CliExit.DONE
    running.stop()
    backup = tmp_path / "backup"
    assert run(["backup", running.data_dir, "--to", str(backup)]) == CliExit.DONE
    shutil.rmtree(running.data_dir)
    assert run(["restore", str(backup), "--to", running.data_dir]) == CliExit.DONE
    running.start()
    with ringlog.connect(running.url, wait=10) as client:
        assert contents(client) == before


def test_a_cold_directory_is_backed_up_and_restored_with_the_data(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    cold, backup, restored = tmp_path / "cold", tmp_path / "backup", tmp_path / "cold2"
    cold.mkdir(mode=0o700)
    tiers = {"dir": str(cold), "hot_segments": 0, "interval_s": 0.1}
    with engine(wal={"shards": 1}, storage={"enabled": True}, cold=tiers) as running:
        with ringlog.connect(running.url, wait=10) as client:
            fill(client)
            assert run(["checkpoint", "--url", running.url]) == CliExit.DONE
            data = Path(running.data_dir)
            wait_until(lambda: not list(data.glob("[pt]*/**/*.data")), 30, "everything to be relocated")
            assert run(["checkpoint", "--url", running.url]) == CliExit.DONE
            before = contents(client)
            options = ["--url", running.url, "--cold-dir"]
            empty = tmp_path / "empty"
            for wrong in (tmp_path / "absent", empty):  # Mistyped, or a volume that is not mounted.
                assert run(["backup", "--to", str(backup), *options, str(wrong)]) == CliExit.USAGE
                assert str(wrong) in capsys.readouterr().err
                assert not (backup / MANIFEST).exists()
                empty.mkdir(exist_ok=True)
            assert run(["backup", "--to", str(backup), "--url", running.url]) == CliExit.DONE
        running.stop()
        for wrong in (tmp_path / "absent", empty):
            target = tmp_path / f"from-{wrong.name}"
            command = ["backup", str(data), "--to", str(target), "--cold-dir", str(wrong)]
            assert run(command) == CliExit.USAGE
            assert not (target / MANIFEST).exists()
        target, there = tmp_path / "configured", tmp_path / "absent"
        monkeypatch.setenv("RINGLOG_COLD_DIR", str(there))
        capsys.readouterr()
        assert run(["backup", str(data), "--to", str(target)]) == CliExit.USAGE
        assert capsys.readouterr().err.count(str(there)) == 2, "a warning about the setting, and the error"
        assert not (target / MANIFEST).exists()
        shutil.rmtree(data)
        assert run(["restore", str(backup), "--to", str(data)]) == CliExit.USAGE
        assert "--cold-dir" in capsys.readouterr().err
        restored.mkdir()
        (restored / "other").touch()
        for wrong in (restored, data, data.parent):
            command = ["restore", str(backup), "--to", str(data), "--cold-dir", str(wrong)]
            assert run(command) == CliExit.USAGE
            assert not list(data.rglob("*")), "nothing is copied"
        (restored / "other").unlink()
        assert run(["restore", str(backup), "--to", str(data), "--cold-dir", str(restored)]) == CliExit.DONE
        shutil.rmtree(cold)
        restored.rename(cold)
        assert run(["verify", str(data), "--deep", "--cold-dir", str(cold)]) == CliExit.DONE
        assert run(["verify", str(data)]) == CliExit.FAILED, "records in the cold tier were not looked at"
        assert run(["verify", str(data), "--without-cold"]) == CliExit.DONE
        running.start()
        with ringlog.connect(running.url, wait=10) as client:
            assert contents(client) == before


def test_a_remote_client_reads_a_restored_cold_tier_before_the_first_round_of_moves(tmp_path: Path) -> None:
    """The restored directories name their owner."""
    cold, backup, restored = tmp_path / "cold", tmp_path / "backup", tmp_path / "restored"
    cold.mkdir(mode=0o700)
    options: dict[str, Any] = {
        "wal": {"shards": 1},
        "storage": {"enabled": True},
        "directory": tmp_path / "e",
    }
    tiers = {"dir": str(cold), "hot_segments": 0, "interval_s": 0.1}
    with engine(cold=tiers, **options) as running:
        data = Path(running.data_dir)
        with ringlog.connect(running.url, wait=10) as client:
            fill(client)
            before = contents(client)
            assert run(["checkpoint", "--url", running.url]) == CliExit.DONE
            wait_until(lambda: not list(data.glob("[pt]*/**/*.data")), 30, "everything to be relocated")
        assert run(["backup", "--to", str(backup), "--url", running.url]) == CliExit.DONE
    shutil.rmtree(data)
    assert run(["restore", str(backup), "--to", str(data), "--cold-dir", str(restored)]) == CliExit.DONE
    identity = json.loads((data / "meta/engine").read_bytes())
    assert (restored / "engine").read_text().startswith(identity["engine_id"])
    assert (data / "meta/cold-owner").read_text() == identity["engine_id"] + " confirmed"
    server, port = new_key(), free_port()
    key_file = private_file(tmp_path / "server.key", key_file_text(server))
    native = {"endpoint": f"tcp://127.0.0.1:{port}", "curve_key_file": key_file}
    tiers = {"dir": str(restored), "hot_segments": 0, "interval_s": 3_600}
    remote = f"ringlog://127.0.0.1:{port}?server_key={quote(server.public, safe='')}"
    with (
        engine(cold=tiers, gateway={"enabled": True}, native=native, **options) as running,
        ringlog.connect(remote, wait=10, key=new_key().secret.decode()) as client,
    ):
        socket = Path(running.info.shm_dir) / "relocator.sock"
        wait_until(socket.exists, 30, "the relocator to start")
        assert contents(client) == before


def test_an_offline_backup_refuses_a_running_engine(running: TestEngine, tmp_path: Path) -> None:
    assert run(["backup", running.data_dir, "--to", str(tmp_path / "backup")]) == CliExit.USAGE


def test_a_backup_without_an_engine_exits_with_no_connection(tmp_path: Path) -> None:
    code = run(["backup", "--to", str(tmp_path / "backup"), "--url", f"ringlog://{tmp_path}/nowhere"])
    assert code == CliExit.NO_CONNECTION


def test_checkpoint_names_the_files_of_a_consistent_copy(running: TestEngine, capsys) -> None:
    with ringlog.connect(running.url, wait=10) as client:
        fill(client)
    assert run(["checkpoint", "--url", running.url, "--output", "raw"]) == CliExit.DONE
    files = capsys.readouterr().out.split()
    assert any(path.startswith("meta/snapshot-00.") for path in files)
    assert any(path.startswith("packs/") and path.endswith(".data") for path in files)
    assert all((Path(running.data_dir) / path).exists() for path in files)


def test_scrub_verifies_all_stored_data_and_reports_damage(running: TestEngine, capsys) -> None:
    """A finding contains the name of the damaged segment."""
    with ringlog.connect(running.url, wait=10) as client:
        fill(client)
    assert run(["checkpoint", "--url", running.url]) == CliExit.DONE
    capsys.readouterr()
    assert run(["scrub", "--url", running.url, "--output", "json"]) == CliExit.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["files"] > 0, found["findings"]) == (True, [])
    part = next(Path(running.data_dir).glob("packs/*.data"))
    with part.open("r+b") as file:
        file.seek(6_000)
        file.write(b"rotten")
    assert run(["scrub", "--url", running.url, "--output", "json"]) == CliExit.DAMAGE
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert part.stem in finding
