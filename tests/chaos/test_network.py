"""The class `network`: rows pass; lost, duplicated and reordered records, and a shard without history, are
detected."""

from __future__ import annotations

import importlib
import os
import textwrap
from pathlib import Path

import pytest

import chaos
from chaos import network
from chaos.network.cuts import History
from chaos.order import Account, Order
from ringlog.drill.checks import GuaranteeBroken

arenas = importlib.import_module("chaos.attack.arena")
ROOT = Path(chaos.__file__).parent.parent
FORGETS = """
    from ringlog.topic.dedup import ProducerHistory, ProducerTable
    ProducerTable.get = lambda self, producer_id: ProducerHistory()
"""
"""Planted bug: the shard does not remember the producer numbers that it appended (mutant 19)."""


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ([b"a"], "are missing"), ([b"a", b"b", b"b"], "twice"), ([b"b", b"a"], "order"),
        ([b"a", b"b", b"r"], "a refused record was stored"),
        ([b"a", b"b", b"z"], "were never sent"),
    ],
)  # fmt: skip
def test_the_judge_reports_each_wrong_content(stored, says):
    """Only acked records and records of unknown outcome may be stored, each once and in order."""
    history = History(acked=[b"a", b"b"], unknown=[b"u"], refused=[b"r"])
    history.judge([b"a", b"b"])
    history.judge([b"a", b"u", b"b"])
    with pytest.raises(GuaranteeBroken, match=says):
        history.judge(stored)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_network_rows_pass_and_are_counted(account, tmp_path):
    settings = {"rows": ["RF-88", "RF-91"], "step": 29}
    network.run(Order("network", 1, 10, tmp_path, settings), account)
    assert account.findings == []
    assert (account.counts["rows"], set(account.faults)) == (2, {"RF-88", "RF-91"})
    assert account.counts["cases"] > 20


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_shard_without_producer_history_is_detected(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(FORGETS))
    real = arenas.engine
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    monkeypatch.setattr(arenas, "engine", lambda **given: real(**{**given, "environ": environ}))
    account = Account()
    network.run(Order("network", 1, 10, tmp_path / "s", {"rows": ["RF-91"], "step": 29}), account)
    assert [finding.case for finding in account.findings] == ["RF-91/1"]
