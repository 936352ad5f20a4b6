"""`verify` and `inspect` report a finding for any bytes in a file, and never raise a traceback (RF-114)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ringlog.cli.app import run
from ringlog.cli.outcome import CliExit
from ringlog.verify.directory import data_paths, verify_path

pytestmark = pytest.mark.slow
ROUNDS = 12


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return the data truncated, extended, overwritten, shuffled, or with a few flipped bits."""
    whole = bytearray(data[: 1 << 20])
    at = dice.randrange(len(whole)) & ~7
    match dice.randrange(5):
        case 0:
            return bytes(whole[:at])
        case 1:
            return bytes(whole[:at]) + dice.randbytes(dice.randrange(200)) + bytes(whole[at:])
        case 2:
            whole[at : at + 64] = dice.randbytes(64)
        case 3:
            other = dice.randrange(len(whole)) & ~7
            whole[at : at + 512], whole[other : other + 512] = (
                whole[other : other + 512],
                whole[at : at + 512],
            )
        case _:
            for _ in range(4):
                whole[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
    return bytes(whole)


def test_verify_and_inspect_survive_any_mutated_file(sealed: Path, tmp_path: Path, capsys) -> None:
    dice = random.Random(20_260_101)
    for unit in data_paths(sealed):
        parts = [part for part in sealed.glob(f"{unit}*") if part.is_file()]
        for part in parts:
            data = part.read_bytes()
            for each in parts:
                target = tmp_path / each.relative_to(sealed)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(each.read_bytes())
            for _ in range(ROUNDS):
                mangled = tmp_path / part.relative_to(sealed)
                mangled.write_bytes(mutated(data, dice))
                verify_path(str(tmp_path), unit, is_deep=True)
                assert run(["inspect", str(mangled), "--limit", "1"]) in {
                    CliExit.DONE,
                    CliExit.USAGE,
                    CliExit.DAMAGE,
                }
                capsys.readouterr()
