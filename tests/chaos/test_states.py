"""The class `states`: small runs pass, planted bugs are found, cases replay, and its image rules are
consistent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos import states
from chaos.order import Account, Order
from chaos.rigs.judge import POWER_LOSS
from chaos.states import edges, replay
from chaos.states.explore import Explorer, Part, Share, Tally, cuts_of, explore, record
from chaos.states.images import Image
from chaos.states.judge import Depth, judge
from chaos.states.membership import replayed, why_illegal
from chaos.states.offline import Offline
from chaos.states.workload import ALPHABET
from ringlog.actors.wal_shard.commit.batch_committer import BatchCommitter
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, LogPosition
from ringlog.actors.wal_shard.recovery import log_files
from ringlog.actors.wal_shard.recovery.copy_forward import CopyForward
from ringlog.actors.wal_shard.recovery.file_ends import FileEnds
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.actors.wal_shard.retention.checkpoint import ShardCheckpoint
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import InvariantViolation
from ringlog.frame.layout import FrameType
from ringlog.segment.layout import DEL, DEL_HEADER_BYTES, DELETED
from ringlog.segment.writer import SegmentWriter
from ringlog.testing import disk as d
from ringlog.testing.simulated_file import SECTOR_BYTES
from ringlog.tier.copies import SegmentCopies
from ringlog.topic.reservation import Reservation

FEW = Share(recoveries_every=1 << 30, sends_again_every=10, goes_on_every=100, verified_every=4)


def order(tmp_path) -> Order:
    scratch = tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}"
    scratch.mkdir()
    return Order("states", 1, 60.0, scratch)


def explored(tmp_path, *histories, share=FEW) -> Tally:
    (tmp_path / "images").mkdir(exist_ok=True)
    return explore(histories, share=share, offline=Offline(tmp_path / "images"))


def caught(tmp_path, *histories, share=FEW) -> str:
    with pytest.raises(GuaranteeBroken) as broken:
        explored(tmp_path, *histories, share=share)
    return str(broken.value)


def is_broken(row, edge) -> bool:
    try:
        edges.judge_edge(row, edge, Depth())
    except GuaranteeBroken:
        return True
    return False


# -- runs without faults ----------------------------------------------------------------------------------


def test_the_alphabet_has_twelve_operations_and_each_one_runs():
    """Histories are sequences of these operations (RF-58)."""
    assert len(set(ALPHABET)) == 12
    for step in ALPHABET:
        history, _ = record((step,))
        assert len(history.operations) > 20


@pytest.mark.timeout(120)
def test_crash_states_of_deletes_pass(tmp_path):
    """The offline verifier checks the images too. Further crashes occur during recovery and after it (RF-57,
    RF-59)."""
    share = Share(
        recoveries_every=60, recovery_cuts=1, sends_again_every=10, goes_on_every=50, verified_every=3
    )
    tally = explored(tmp_path, ("delete_seq",), ("delete_tag",), ("config",), share=share)
    assert tally.judged > 70
    assert tally.acked > 50
    assert tally.deleted > 10
    assert tally.verified > 20
    assert tally.recoveries > 0
    assert tally.went_on > 0


def test_a_common_prefix_of_histories_is_explored_once(tmp_path):
    explorer = Explorer(Tally(), FEW)
    explorer.one(("append",))
    before = explorer.tally.cuts
    explorer.one(("append", "create"))
    assert explorer.tally.cuts - before < before


@pytest.mark.parametrize("row", sorted(edges.ROWS))
@pytest.mark.timeout(60)
def test_edited_images_pass(tmp_path, row):
    """A sample of each row (RF-60, RF-66, RF-68, RF-69)."""
    made = list(edges.edges(row))
    assert len(made) > 10
    offline = Offline(tmp_path)
    for edge in made[:: max(len(made) // 12, 1)]:
        edges.judge_edge(row, edge, Depth(offline))


# -- planted bugs -----------------------------------------------------------------------------------------


def test_a_deletion_that_recovery_ignores_is_detected_and_replays(tmp_path, monkeypatch):
    """A replayed case fails with the planted bug and passes without it."""
    apply_control = Replay._apply_control

    def without_removals(self, topic_id, body):
        if type(body).__name__ != "RecordsRemoved":
            apply_control(self, topic_id, body)

    monkeypatch.setattr(Replay, "_apply_control", without_removals)
    with pytest.raises(GuaranteeBroken) as broken:
        explore([("delete_seq",)], share=FEW)
    assert "there again" in str(broken.value)
    with pytest.raises(GuaranteeBroken):
        replay(order(tmp_path), broken.value.case)
    monkeypatch.undo()
    replay(order(tmp_path), broken.value.case)


def test_a_segment_renamed_before_its_sync_is_detected(tmp_path, monkeypatch):
    """The contents of a segment may then be missing under its name (mutant 4)."""
    monkeypatch.setattr(d.SimulatedDisk, "rename", _careless_rename)
    monkeypatch.setattr(SegmentWriter, "_sync_parts", lambda self: None, raising=False)
    monkeypatch.setattr(d.RecordingDisk, "sync_file", _only_of_logs)
    assert caught(tmp_path, ("seal",))


def _careless_rename(self, source, target, _rename=d.SimulatedDisk.rename):
    self._node("rename", source).dirty = False
    _rename(self, source, target)


def _only_of_logs(self, fd, _sync=d.RecordingDisk.sync_file):
    if ".log" in self.path_of(fd):
        _sync(self, fd)


@pytest.mark.night
def test_a_snapshot_without_a_directory_sync_is_detected(tmp_path, monkeypatch):
    """The log is removed before the name of the snapshot is durable (mutants 3 and 14)."""
    sync_dir = d.RecordingDisk.sync_dir
    monkeypatch.setattr(
        d.RecordingDisk,
        "sync_dir",
        lambda self, path: None if path.endswith("/meta") else sync_dir(self, path),
    )
    assert caught(tmp_path, ("append", "seal", "append", "seal"), ("seal", "append", "seal", "seal"))


@pytest.mark.night
def test_a_hot_copy_removed_before_the_sync_of_the_cold_one_is_detected(tmp_path, monkeypatch):
    """The cold copy is not synced when the host's copy is removed (mutant 13)."""
    monkeypatch.setattr(
        SegmentCopies, "upload_part", lambda self, name: self.store.put(name, self.path(name))
    )
    monkeypatch.setattr(d.RecordingDisk, "sync_dir", _not_cold(d.RecordingDisk.sync_dir))
    assert caught(tmp_path, ("relocate",))


def _not_cold(sync_dir):
    return lambda self, path: None if path.startswith("/cold") else sync_dir(self, path)


def test_an_ack_before_the_sync_is_detected_by_states(tmp_path, monkeypatch):
    """The shard acks a frame before the sync that covers it (mutant 1)."""
    monkeypatch.setattr(BatchCommitter, "on_written", BatchCommitter.finish)
    assert caught(tmp_path, ("append",))


def test_a_reservation_that_is_not_restored_is_detected(tmp_path, monkeypatch):
    """Seqs would be assigned twice (mutant 18, RF-66)."""
    monkeypatch.setattr(Reservation, "restore", lambda self, value: None)
    assert any(is_broken("RF-66", edge) for edge in edges.edges("RF-66"))


def test_a_recovery_that_rejects_a_torn_batch_is_detected(tmp_path, monkeypatch):
    """A recovery that treats a torn commit batch as damage does not start (RF-60)."""
    monkeypatch.setattr(FileEnds, "_doubt", lambda self, file, stop: None)
    monkeypatch.setattr(CopyForward, "copy", lambda self, *given, **named: None)
    assert caught(tmp_path, ("append",), ("append_many",))


# -- legal images -----------------------------------------------------------------------------------------


def test_every_generated_image_is_legal_and_forged_ones_are_not():
    """The class `blocks` compares the states of real file systems with these rules."""
    for steps in (("append_many",), ("restart",), ("seal",)):
        history, tree = record(steps)
        made = 0
        for number, _ in cuts_of(history, tree):
            for image in [tree.as_killed(), tree.as_synced(), *tree.after_power_loss(number)]:
                made += 1
                assert not why_illegal(tree, image, garbled_max=1)
        assert made > 200
        forged = dict(image.files)
        path = max(forged, key=lambda each: len(forged[each]))
        forged[path] = forged[path][:SECTOR_BYTES] + b"forged" + forged[path][SECTOR_BYTES + 6 :]
        assert why_illegal(tree, Image(image.directories, forged))
        assert why_illegal(tree, Image(image.directories, {**image.files, "/data/stranger": b""}))


def test_names_are_lost_in_order_and_contents_in_any_order():
    base = Image(("/data",), {"/data/a": b"old"})
    calls = [
        d.Write("/data/a", 0, b"new"), d.Create("/data/b"), d.Write("/data/b", 0, b"x" * 600),
        d.Rename("/data/b", "/data/c"),
    ]  # fmt: skip
    tree = replayed(calls, base)
    keys = {image.key() for image in [tree.as_killed(), tree.as_synced(), *tree.after_power_loss()]}

    def is_made(**files: bytes) -> bool:
        return Image(("/data",), {f"/data/{name}": data for name, data in files.items()}).key() in keys

    assert is_made(a=b"old")
    assert is_made(a=b"new", b=b"x" * 600)
    assert is_made(a=b"old", c=b"x" * 600)
    assert is_made(a=b"new", c=b"x" * 512), "cut at a sector"
    assert is_made(a=b"old", c=bytes(600)), "a length without contents"
    assert not is_made(a=b"old", b=b"x", c=b"x"), "one file has one of its names"
    assert not is_made(a=b"nld")


def test_a_deletion_mark_is_set_or_unset_in_every_image(tmp_path):
    """A single byte never tears. Any other value would be damage, which no recovery repairs."""
    history, tree = record(("append_many", "relocate", "delete_seq", "restart", "seal"))
    seen, offline = set(), Offline(tmp_path)
    for number, facts in cuts_of(history, tree):
        done = history.operations[number]
        if not isinstance(done, d.Write) or not done.path.endswith(DEL):
            continue
        assert len(done.data) > 1, "several marks in one call"
        for image in tree.after_power_loss(number):
            marks = image.files[done.path][DEL_HEADER_BYTES:]
            if marks not in seen:
                judge(image, facts, POWER_LOSS, depth=Depth(offline, sends_again=False))
            seen.add(marks)
    made = {tuple(each.to_bytes(1) for each in marks) for marks in seen}
    changed = [set(column) for column in zip(*made, strict=True) if len(set(column)) > 1]
    assert len(changed) > 1
    assert all(each == {b"\0", bytes([DELETED])} for each in changed)
    assert len(made) == 1 << len(changed), "one mark reaches the device without another"
    assert offline.verified >= len(made)


@pytest.mark.night
def test_an_account_counts_only_the_rows_that_ran(tmp_path, monkeypatch):

    monkeypatch.setattr(states.edges, "ROWS", {"RF-66": edges.ROWS["RF-66"]})
    chosen = [(("append",), False), (("create",), True)]
    monkeypatch.setattr(states, "_all", lambda order, longest, part: iter(chosen))
    account = Account()
    settings = {"sends_again_every": 50, "goes_on_every": 50, "verified_every": 10}
    states.run(replace(order(tmp_path), settings=settings), account)
    assert (account.counts["sequences"], account.counts["longer_sequences"]) == (1, 1)
    assert account.counts["recovered"] > 50
    assert account.faults["RF-66"] == account.counts["edited"] > 5
    assert not account.faults["RF-60"]
    assert not account.findings


@pytest.mark.slow
def test_two_processes_explore_the_same_states_as_one(tmp_path, monkeypatch):
    """No state is explored twice, although a prefix may belong to the other process, and no state is
    omitted."""
    chosen = [("append",), ("create",), ("append", "create"), ("create", "append")]
    assert len({Part(0, 2).has(steps) for steps in chosen}) == 2, "each has some"

    def those_of(order: Order, longest: int, part: Part) -> Iterator[tuple[tuple[str, ...], bool]]:
        return ((steps, False) for steps in chosen if part.has(steps))

    monkeypatch.setattr(states, "_all", those_of)
    monkeypatch.setattr(states.edges, "ROWS", {"RF-66": edges.ROWS["RF-66"]})
    accounts = [Account(), Account()]
    for processes, account in enumerate(accounts, 1):
        settings = {"recoveries_every": 1_000_000, "sends_again_every": 100, "verified_every": 100}
        scratch = tmp_path / str(processes)
        scratch.mkdir()
        states.run(Order("states", 1, 200.0, scratch, {**settings, "processes": processes}), account)
        assert account.findings == []
    one, two = (account.counts for account in accounts)
    assert one["recovered"] > 100
    assert {name: two[name] for name in ("sequences", "images", "cuts", "recovered", "edited")} == {
        name: one[name] for name in ("sequences", "images", "cuts", "recovered", "edited")
    }
    assert accounts[1].figures["cpu_s_1"] > 0


# -- mutants of edited images -----------------------------------------------------------------------------


def test_a_recovery_that_refuses_an_empty_newest_file_is_detected(monkeypatch):
    """The newest log file may be empty after a crash (RF-68)."""
    monkeypatch.setattr(log_files, "holds_marks", lambda read, size: True)
    assert any(is_broken("RF-68", edge) for edge in edges.edges("RF-68"))


# -- settings ---------------------------------------------------------------------------------------------


def test_settings_narrow_the_class_states(account, tmp_path):
    settings = {"only": ["append", "edges/RF-66"], "recoveries_every": 1_000_000, "verified_every": 20}
    states.run(Order("states", 1, 30.0, tmp_path, settings), account)
    assert account.findings == []
    assert account.counts["sequences"] == 1
    assert account.counts["edited"] == account.faults["RF-66"] > 5
    assert not account.faults["RF-60"]


def test_a_history_that_fails_without_a_crash_is_a_finding(tmp_path, monkeypatch):
    """No check keeps a commit batch within its file (mutant 43)."""
    monkeypatch.setattr(LogPosition, "fits", lambda self, length: True)
    account = Account()
    wanted = Order("states", 1, 30.0, tmp_path, {"only": ["rotate"]})
    states.run(wanted, account)
    assert [finding.case for finding in account.findings] == ["rotate"]
    with pytest.raises(InvariantViolation, match="commit batch must start at"):
        replay(wanted, "rotate")


def test_steps_outside_of_the_alphabet_pass(tmp_path):
    assert explored(tmp_path, ("delete_amid",), ("evict",)).deleted > 0


def test_a_deletion_that_is_used_before_it_is_durable_is_detected(tmp_path, monkeypatch):
    """The checkpoint does not wait for the sync of the deletion (mutant 28)."""
    monkeypatch.setattr(ShardCheckpoint, "_await_durable", lambda self, group: None)
    assert "came back as" in caught(tmp_path, ("delete_amid",))


def test_an_eviction_without_a_sync_is_detected(tmp_path, monkeypatch):
    """The append has class `disk`, but the floor that it raises must be synced (X2, mutant 29)."""
    add_control = CommitBatch.add_control

    def unsynced(self, frame, topic=None, *, sync=True):
        add_control(self, frame, topic, sync=sync and frame[4] != FrameType.EVICT_WATERMARK)

    monkeypatch.setattr(CommitBatch, "add_control", unsynced)
    assert "deleted records [1] are there again" in caught(tmp_path, ("evict",))
