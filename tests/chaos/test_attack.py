"""The class `attack`: a few rows against an engine, and engines with a planted hole that the row for it
detects."""

from __future__ import annotations

import importlib
import os
import textwrap
from pathlib import Path

import pytest

import chaos
from chaos import attack
from chaos.attack import local
from chaos.order import Account, Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
arenas = importlib.import_module("chaos.attack.arena")
ROOT = Path(chaos.__file__).parent.parent

HOLES = {
    # Mutant 35: every client that knows the server's public key is accepted.
    "RF-105": """
        from ringlog.actors.gateway.front_end import zap
        from ringlog.access.key_ring import KeyRing
        answered = zap.answer
        zap.answer = lambda parts, keys: answered(parts, KeyRing(admits_all=True))
    """,
    # Mutant 36: the prefix of a key's rights is not checked.
    "RF-106": """
        from ringlog.access.keys import Principal
        Principal.covers = lambda self, topic: True
    """,
    # A shard that appends repeated frames again.
    "RF-104": """
        from ringlog.topic.dedup import ProducerHistory, ProducerTable
        ProducerTable.get = lambda self, producer_id: ProducerHistory()
    """,
    # The fields of messages have no ranges.
    "RF-100": """
        import msgspec
        real = msgspec.Meta
        msgspec.Meta = lambda **limits: real()
    """,
    # Mutant 37: a body is decompressed before its declared size is checked.
    "RF-103": """
        import zstandard
        from ringlog.frame import compress
        compress._unpack_zstd = lambda packed, raw_len: zstandard.ZstdDecompressor().decompress(bytes(packed))
        compress.DECOMPRESS_RATIO_MAX = 1 << 40
    """,
    # Mutant 39: a payload appears in a log line.
    "RF-113": """
        import logging, sys
        from ringlog.actors.gateway.requests import appends
        before = appends.check_frames
        def check_frames(message, data, bytes_max):
            print("got", bytes(data), file=sys.stderr, flush=True)
            return before(message, data, bytes_max)
        appends.check_frames = check_frames
    """,
}


def tried(
    tmp_path: Path, rows: list[str], hole: str = "", monkeypatch: pytest.MonkeyPatch | None = None,
    **settings: int,
) -> Account:  # fmt: skip
    """Run rows against an engine. Every process of the engine runs the code `hole`."""
    account = Account()
    if hole and monkeypatch is not None:
        (tmp_path / "hole").mkdir()
        (tmp_path / "hole" / "sitecustomize.py").write_text(textwrap.dedent(hole))
        real = arenas.engine

        def with_hole(**settings):
            path = os.pathsep.join([str(tmp_path / "hole"), str(ROOT)])
            return real(**{**settings, "environ": {"PYTHONPATH": path}})

        monkeypatch.setattr(arenas, "engine", with_hole)
    attack.run(Order("attack", 1, 30, tmp_path / "scratch", {"rows": rows, **settings}), account)
    return account


@pytest.mark.night
def test_attack_rows_pass_and_are_counted(tmp_path):
    rows = ["RF-105", "RF-106", "RF-104", "RF-96", "RF-113"]
    account = tried(tmp_path, rows)
    assert account.findings == []
    assert account.counts["rows"] == len(rows)
    assert set(account.faults) == set(rows)
    assert account.counts["promised"] > len(rows)


@pytest.mark.night
def test_hostile_messages_give_errors_and_do_not_affect_recovery(tmp_path):
    """Messages of every kind with every field changed are sent to every socket. Then all processes are
    killed, twice."""
    account = tried(tmp_path, ["RF-100"], per_kind=2)
    assert account.findings == []
    assert account.counts["cases"] > 2_000


@pytest.mark.night
@pytest.mark.parametrize("row", HOLES)
def test_a_planted_hole_is_detected_by_its_row(tmp_path, monkeypatch, row):
    account = tried(tmp_path, [row], HOLES[row], monkeypatch)
    assert [finding.case for finding in account.findings] == [f"{row}/1"]
    assert account.counts["rows"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="switching to another user needs root")
def test_files_and_directories_open_to_others_are_detected(tmp_path):
    """The check finds directories, files and sockets that other users may enter or read (mutant 38)."""
    tmp_path.chmod(0o755)
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "a.log").write_bytes(b"x")
    (tmp_path / "closed" / "a.log").chmod(0o644)
    assert local.loose_modes([str(tmp_path / "closed")]) == ["a.log 0o644"]
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    assert any(found.startswith("open") for found in local.loose_modes([str(tmp_path / "open")]))
