"""The fuzzer: its corpus passes, a small run executes inputs, and a broken decoder is detected."""

from __future__ import annotations

import pytest

from chaos import fuzz
from chaos.fuzz.driver import TARGETS, kept, load
from chaos.order import Account, Order

SECONDS = fuzz.START_S + 3
PLANTED = "chaos.fuzz.planted:envelopes"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_past_crashers_pass(name):
    """Inputs that once broke a decoder run each time (RF-102, RF-114)."""
    target = load(name)
    tried = [b"", *target.seeds(), *kept(name)]
    assert len(tried) > 5
    for data in tried:
        target.check(data[: target.MAX_LEN])


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_small_run_counts_executions_and_finds_a_planted_bug(tmp_path):
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


def test_executions_of_reads_the_count_of_libfuzzer():
    assert fuzz.executions_of("#99\tINITED cov\n#1024\tpulse\nstat::number_of_executed_units: 4321\n") == 4321
    assert fuzz.executions_of("#99\tINITED cov\n#1024\tpulse cov") == 1024
    assert fuzz.executions_of("nothing") == 0
