"""The fuzzer: its corpus holds, a small run does something, and a decoder that is spoilt is caught."""

from __future__ import annotations

import pytest

from chaos import fuzz
from chaos.fuzz.driver import TARGETS, kept, load
from chaos.order import Account, Order

SECONDS = fuzz.START_S + 3
PLANTED = "chaos.fuzz.planted:envelopes"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_past_crashers_hold(name):
    """RF-102, RF-114: what once broke something is run each time."""
    target = load(name)
    tried = [b"", *target.seeds(), *kept(name)]
    assert len(tried) > 5
    for data in tried:
        target.check(data[: target.MAX_LEN])


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_small_run_counts_and_a_planted_bug_is_found_and_replayed(tmp_path):
    pytest.importorskip("atheris")
    sound, spoilt = Account(), Account()
    for account, planted in ((sound, ""), (spoilt, PLANTED)):
        scratch = tmp_path / (planted.partition(":")[2] or "sound")
        scratch.mkdir()
        order = Order("fuzz", 1, SECONDS, scratch, {"targets": ["envelope"], "planted": planted})
        fuzz.run(order, account)
    assert sound.findings == []
    assert sound.counts["executions"] > 1_000
    assert sound.faults["RF-102"] == sound.counts["executions"]
    assert spoilt.findings
    assert "AttributeError" in spoilt.findings[0].what
    case = spoilt.findings[0].case
    fuzz.replay(Order("fuzz", 1, 1, tmp_path), case)
    with pytest.raises(AssertionError, match="AttributeError"):
        fuzz.replay(Order("fuzz", 1, 1, tmp_path, {"planted": PLANTED}), case)


def test_executions_are_what_libfuzzer_says():
    assert fuzz.executions_of("#99\tINITED cov\n#1024\tpulse\nstat::number_of_executed_units: 4321\n") == 4321
    assert fuzz.executions_of("#99\tINITED cov\n#1024\tpulse cov") == 1024
    assert fuzz.executions_of("nothing") == 0
