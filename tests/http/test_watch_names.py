"""Names of watch sessions: they cannot be guessed, and each contains the number of its gateway."""

from __future__ import annotations

import re

import pytest

from ringlog.actors.http_gateway.streams.watches import maker_of, new_wid
from ringlog.limits import HTTP_PROCESSES_MAX

NAMES = 2_000


def test_names_are_128_random_bits_behind_a_prefix() -> None:
    names = [new_wid(number % HTTP_PROCESSES_MAX) for number in range(NAMES)]
    assert all(re.fullmatch(r"wid_[A-Za-z0-9_-]{22}", name) for name in names)
    assert len({name[:-1] for name in names}) == NAMES
    for at in range(4, 25):
        assert len({name[at] for name in names}) == 64, f"character {at} does not take every value"


@pytest.mark.parametrize("maker", range(HTTP_PROCESSES_MAX))
def test_a_name_tells_its_maker(maker: int) -> None:
    for _ in range(50):
        name = new_wid(maker)
        assert maker_of(name, HTTP_PROCESSES_MAX) == maker
        assert maker_of(name, maker) == -1, "there are not so many gateways"


@pytest.mark.parametrize("name", ["", "wid_", "wid_" + "A" * 21, "wid_" + "A" * 23, "wid_" + "Ä" * 22])
def test_other_names_have_no_maker(name: str) -> None:
    assert maker_of(name, HTTP_PROCESSES_MAX) == -1
