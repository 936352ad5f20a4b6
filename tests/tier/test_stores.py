"""The guarantees that the engine needs from both kinds of cold store: a directory and an object store."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from ringlog.config import ColdConfig
from ringlog.errors import ColdUnavailable, ConfigError, CorruptData, DiskError, NotReady
from ringlog.segment.parts import make_dirs
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, PowerLossDamage, SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.objects import SINGLE_PUT_BYTES_MAX, ObjectStore
from ringlog.tier.open_store import open_store
from ringlog.tier.ownership import OwnedStore
from ringlog.tier.store import ColdMissing, SegmentStore, digest_of, object_pieces, verify_object
from tests.support.disk_files import create_file
from tests.support.machine import free_port

PACK = "packs/pack-0001000000000001"
OWN = "topics/00000000000000ff/seg-00000000000000000001-0001000000000002"


@pytest.fixture(params=["directory", "objects"])
def store(request, tmp_path) -> SegmentStore:
    if request.param == "directory":
        (tmp_path / "cold").mkdir()
        return LocalStore(RealDisk(), str(tmp_path / "cold"))
    options = request.getfixturevalue("s3")
    return ObjectStore(RealDisk(), f"s3://cold/{tmp_path.name}", timeout_s=10, **options)


@pytest.fixture
def source(tmp_path):
    def make(data: bytes, name: str = "source") -> str:
        path = tmp_path / name
        path.write_bytes(data)
        path.chmod(0o600)
        return str(path)

    return make


def test_an_object_is_read_back_whole_and_in_ranges(store, source):
    """The digest of the written bytes equals the digest of the bytes read."""
    data = os.urandom(100_000)
    digest = store.put(f"{PACK}.data", source(data))
    assert digest == digest_of([data])
    assert store.size(f"{PACK}.data") == len(data)
    assert store.get_range(f"{PACK}.data", 4_096, 70_000) == data[4_096:70_000]
    assert store.get_range(f"{PACK}.data", 99_000, 200_000) == data[99_000:]
    assert store.get_range(f"{PACK}.data", 100_000, 200_000) == b""
    assert b"".join(object_pieces(store, f"{PACK}.data", 30_000)) == data
    verify_object(store, f"{PACK}.data", digest)


def test_an_empty_file_is_an_object_too(store, source):
    digest = store.put(f"{PACK}.tags", source(b""))
    verify_object(store, f"{PACK}.tags", digest)
    assert store.size(f"{PACK}.tags") == 0


def test_a_large_file_is_uploaded_in_parts(store, source):
    data = os.urandom(SINGLE_PUT_BYTES_MAX) + b"tail"
    digest = store.put(f"{OWN}.data", source(data))
    assert digest == digest_of([data])
    verify_object(store, f"{OWN}.data", digest)


def test_put_replaces_an_existing_object(store, source):
    """A repeated move overwrites the leftovers of an interrupted one."""
    store.put(f"{PACK}.del", source(b"old", "a"))
    verify_object(store, f"{PACK}.del", store.put(f"{PACK}.del", source(b"newer", "b")))
    assert store.get_range(f"{PACK}.del", 0, 10) == b"newer"


def test_a_repeated_delete_succeeds(store, source):
    """The delete of an absent object succeeds."""
    store.put(f"{PACK}.data", source(b"x"))
    store.delete(f"{PACK}.data")
    store.delete(f"{PACK}.data")
    assert not store.exists(f"{PACK}.data")


def test_an_absent_object_is_missing_and_not_unavailable(store):
    for ask in (
        lambda: store.size(f"{PACK}.data"),
        lambda: store.get_range(f"{PACK}.data", 0, 10),
    ):
        with pytest.raises(ColdMissing):
            ask()
    assert not store.exists(f"{PACK}.data")


def test_the_names_in_a_folder_are_listed(store, source):
    for name in (f"{PACK}.data", f"{PACK}.idx", f"{OWN}.data"):
        store.put(name, source(b"x"))
    assert sorted(store.list("packs")) == [f"{PACK}.data", f"{PACK}.idx"]
    assert sorted(store.list("topics")) == [f"{OWN}.data"]
    assert list(store.list("else")) == []


def test_an_unreadable_source_file_raises_disk_error(store, tmp_path):
    with pytest.raises(DiskError):
        store.put(f"{PACK}.data", str(tmp_path / "absent"))
    assert not store.exists(f"{PACK}.data")


def test_verify_object_detects_wrong_bytes_wrong_size_and_a_lost_object(store, source):
    """A store that did not keep the bytes is detected before the source is deleted."""
    digest = store.put(f"{PACK}.data", source(b"a" * 5_000, "a"))
    store.put(f"{PACK}.data", source(b"a" * 4_999 + b"b", "b"))
    with pytest.raises(CorruptData, match="other bytes"):
        verify_object(store, f"{PACK}.data", digest)
    store.put(f"{PACK}.data", source(b"a" * 4_000, "c"))
    with pytest.raises(CorruptData, match="another size"):
        verify_object(store, f"{PACK}.data", digest)
    store.delete(f"{PACK}.data")
    with pytest.raises(CorruptData, match="missing right after"):
        verify_object(store, f"{PACK}.data", digest)


# -- a directory ----------------------------------------------------------------------------------------


def local(disk) -> LocalStore:
    return LocalStore(disk, "/cold")


def copies_of(disk) -> SegmentCopies:
    return SegmentCopies(disk, "/data", OwnedStore(local(disk), disk, "/data", "aa" * 16))


def prepared(data: bytes = b"d" * 10_000) -> SimulatedDisk:
    disk = SimulatedDisk("/data", "/cold")
    create_file(disk, "/data/source", data)
    return disk


def test_a_crash_or_power_loss_during_put_leaves_a_whole_object_or_none():
    """An object gets its final name only with all its bytes."""
    counting = FaultyDisk(prepared())
    digest = local(counting).put(f"{PACK}.data", "/data/source")
    for nth in range(1, counting.calls["any"] + 1):
        base = prepared()
        with pytest.raises(Halted):
            local(FaultyDisk(base, DiskFault("any", nth, "halt"))).put(f"{PACK}.data", "/data/source")
        for seed in range(3):
            after = base.copy()
            after.power_loss(seed)
            store = local(after)
            if store.exists(f"{PACK}.data"):
                verify_object(store, f"{PACK}.data", digest)
            store.put(f"{PACK}.data", "/data/source")
            verify_object(store, f"{PACK}.data", digest)


@pytest.mark.parametrize("op", ["write", "full_sync", "rename", "dir_sync", "make_dir"])
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_failing_cold_disk_is_unavailable_and_a_retry_succeeds(op, kind):
    """A partial file is never used."""
    disk = FaultyDisk(prepared(), DiskFault(op, 1, kind))
    with pytest.raises(ColdUnavailable) as caught:
        local(disk).put(f"{PACK}.data", "/data/source")
    assert caught.value.detail["reason"] == "cold_unavailable"
    verify_object(local(disk), f"{PACK}.data", local(disk).put(f"{PACK}.data", "/data/source"))


def test_a_stale_handle_is_reopened():
    """The read is retried once by path."""
    disk = FaultyDisk(prepared())
    local(disk).put(f"{PACK}.data", "/data/source")
    disk.plan = [DiskFault("read", disk.calls["read"] + 1, "ESTALE")]
    assert local(disk).get_range(f"{PACK}.data", 0, 3) == b"ddd"
    disk.plan = [DiskFault("read", disk.calls["read"] + 1, "ESTALE", always=True)]
    with pytest.raises(ColdUnavailable):
        local(disk).get_range(f"{PACK}.data", 0, 3)


def test_an_unmounted_directory_is_unavailable_and_not_created(tmp_path, source):
    """An absent store is never treated as an empty store."""
    store = LocalStore(RealDisk(), str(tmp_path / "absent"))
    for ask in (
        lambda: store.put(f"{PACK}.data", source(b"x")),
        lambda: store.get_range(f"{PACK}.data", 0, 1),
        lambda: store.exists(f"{PACK}.data"),
        lambda: store.delete(f"{PACK}.data"),
        lambda: list(store.list("packs")),
    ):
        with pytest.raises(ColdUnavailable):
            ask()
    assert not (tmp_path / "absent").exists()


def test_list_ignores_unknown_names(tmp_path, source):
    """Other files and temporary files are not listed."""
    (tmp_path / "cold").mkdir()
    store = LocalStore(RealDisk(), str(tmp_path / "cold"))
    store.put(f"{PACK}.data", source(b"x"))
    (tmp_path / "cold" / "packs" / "README").write_text("not ours")
    (tmp_path / "cold" / "packs" / "pack-1.data.tmp").write_text("left over")
    assert list(store.list("packs")) == [f"{PACK}.data"]


# -- an object store ------------------------------------------------------------------------------------


def test_an_unreachable_object_store_is_unavailable(tmp_path, s3, source):
    port = free_port()
    options = {**s3, "endpoint": f"http://127.0.0.1:{port}"}
    store = ObjectStore(RealDisk(), "s3://cold/x", timeout_s=0.5, **options)
    with pytest.raises(ColdUnavailable) as caught:
        store.size(f"{PACK}.data")
    assert isinstance(caught.value, NotReady)
    assert caught.value.detail["reason"] == "cold_unavailable"


def test_a_silent_object_store_times_out(s3, source):
    """Every call has a timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    held.append(silent.accept()[0])
            except OSError:
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        options = {**s3, "endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        store = ObjectStore(RealDisk(), "s3://cold/x", timeout_s=0.3, **options)
        with pytest.raises(ColdUnavailable):
            store.get_range(f"{PACK}.data", 0, 10)
        with pytest.raises(ColdUnavailable):
            store.put(f"{PACK}.data", source(b"x" * 100))
        silent.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for connection in held:
        connection.close()


# -- which store ----------------------------------------------------------------------------------------


def test_the_settings_select_one_store_or_none(tmp_path):
    """`cold.dir` and `cold.url` exclude each other."""
    assert open_store(ColdConfig(), RealDisk()) is None
    assert isinstance(open_store(ColdConfig(dir=str(tmp_path)), RealDisk()), LocalStore)
    with pytest.raises(ConfigError, match="one of them"):
        open_store(ColdConfig(dir=str(tmp_path), url="s3://a/b"), RealDisk())


def test_an_invalid_cold_url_is_refused():
    pytest.importorskip("obstore")
    for url in ("nonsense", "ftp://host/x"):
        with pytest.raises(ConfigError, match=r"cold\.url"):
            open_store(ColdConfig(url=url), RealDisk())


def test_a_copy_of_a_dead_predecessor_is_synced_before_it_counts():
    """The predecessor died after the rename and before the sync of the directory. Then the power fails."""
    for calls in range(1, 20):
        disk = SimulatedDisk("/data", "/data/meta", "/cold")
        assert copies_of(disk).require_store().claim() == "aa" * 16
        make_dirs(disk, "/data", "packs")
        create_file(disk, f"/data/{PACK}.data", b"cold bytes")
        dying = FaultyDisk(disk, DiskFault("any", calls, "halt"))
        with contextlib.suppress(Halted):
            copies_of(dying).upload_part(f"{PACK}.data")
        disk.process_kill()
        copies_of(disk).upload_part(f"{PACK}.data")
        disk.power_loss(1, PowerLossDamage.LOST)
        assert LocalStore(disk, "/cold").get_range(f"{PACK}.data", 0, 100) == b"cold bytes"
