"""Rings in the code match docs/reference/format.md."""

from __future__ import annotations

import re
from pathlib import Path

from ringlog.ring import layout
from ringlog.ring.layout import RingIdentity, RingWord, hash_id

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
RINGS = PAGE.split("\n## Rings\n")[1].split("\n## ")[0]


def test_the_example_identity_on_the_page_equals_the_encoded_one() -> None:
    block = re.search(r"```ring\n(.*?)```", RINGS, re.S)
    assert block
    written = bytes.fromhex("".join(re.split(r"   +", line)[0] for line in block[1].splitlines()))
    identity = RingIdentity(
        3, 65_536, 64, hash_id("engine"), hash_id("client"), 1_700_000_000_000_000, 0x0123456789ABCDEF
    )
    assert written == identity.encode()
    assert layout.decode_identity(written, "page") == identity


def test_the_ring_words_have_the_offsets_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| ([a-z_]+) \| (?:producer|consumer) \|", RINGS, re.M)
    assert {name.upper(): int(byte) for byte, name in rows} == {word.name: word * 8 for word in RingWord}
