"""The compactor applies the `compression` of each topic, also in a shared segment."""

from __future__ import annotations

import numpy as np
import pytest

from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.types import Codec
from tests.support.checkpoint_world import checkpoint_all
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world, restart

PAYLOADS = [b"the same words again and again " * 40 for _ in range(50)]


def stored_codecs(world: World, name: str) -> set[Codec]:
    """Return the codecs of a topic's frames in its segments."""
    found: set[Codec] = set()
    run = world.run_of(name)
    topic_id = world.topic(name).topic_id
    for extent in run.core.requests.locations.locate_records(world.topic(name), 0).extents:
        if not extent.path.startswith("wal/"):
            batch = frames.scan(memoryview(run.read(extent.path))[: extent.stop & ~7], extent.start)
            own = batch.take(np.flatnonzero(batch.words[:, layout.W_TOPIC] == topic_id))
            found |= {Codec(int(codec)) for codec in frames.codecs_of(own.words)}
    return found


@pytest.mark.parametrize("storage", ["none", "lz4"])
def test_each_topic_of_a_segment_has_its_own_codec(storage: str) -> None:
    world = new_world()
    wanted = {"plain": "none", "quick": "lz4", "small": "zstd"}
    for name, compression in wanted.items():
        world.put_topic(name, compression=compression)
        world.append(name, PAYLOADS)
    checkpoint_all(world, compression=storage)
    for name, compression in wanted.items():
        expected = Codec[(compression if compression != "none" else storage).upper()]
        assert stored_codecs(world, name) == {expected}
        assert [payload for _, payload in world.records(name)] == PAYLOADS


def test_a_changed_codec_applies_to_records_that_are_sealed_later() -> None:
    world = new_world()
    world.put_topic("t")
    world.append("t", PAYLOADS)
    checkpoint_all(world)
    world.put_topic("t", "merge", compression="zstd")
    world.append("t", PAYLOADS)
    checkpoint_all(world)
    assert stored_codecs(world, "t") == {Codec.NONE, Codec.ZSTD}
    restart(world)
    assert [payload for _, payload in world.records("t")] == PAYLOADS * 2
