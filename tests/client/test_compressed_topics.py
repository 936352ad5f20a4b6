"""Writers apply the topic setting `compression`."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlog
from ringlog.testing import engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WORDS = b"the same words again and again, "


def is_in_log(data_dir: str, words: bytes) -> bool:
    return any(words in path.read_bytes() for path in Path(data_dir).glob("wal/*/*.log"))


def test_producers_use_the_topics_codec_unless_they_set_their_own():
    cases = {"zstd": None, "lz4": None, "none": None, "zstd-plain": "none", "none-lz4": "lz4"}
    with engine(wal={"shards": 1}) as running, ringlog.connect(running.url) as log:
        for name, codec in cases.items():
            log.topics.create(name, compression=name.partition("-")[0])
            with log.producer(name, codec=codec) as producer:
                for n in range(40):
                    producer.send(b"%s %d: " % (name.encode(), n) + WORDS * 3)
            log.append(name, b"<%s> alone: " % name.encode() + WORDS * 100)
            found = [record.data for record in log.reader(name)]
            assert found[:40] == [b"%s %d: " % (name.encode(), n) + WORDS * 3 for n in range(40)]
            assert len(found) == 41
        for name, codec in cases.items():
            is_compressed = (codec or name.partition("-")[0]) != "none"
            # Search for the last record: a compressed body begins with some literal bytes.
            assert is_in_log(running.data_dir, b"%s 39: " % name.encode() + WORDS * 3) is not is_compressed
            alone = b"<%s> alone: " % name.encode() + WORDS * 100
            assert is_in_log(running.data_dir, alone) is name.startswith("none")
