"""Topic names, and the assignment of topics to shards."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from ringlog.errors import InvalidRequest
from ringlog.names import check_topic_name, is_topic_name
from ringlog.placement import home_shard, shard_of, shards_of

VECTORS = {
    1: [0] * 16,
    2: [0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0],
    4: [2, 3, 1, 0, 0, 3, 3, 2, 3, 1, 0, 3, 1, 2, 3, 2],
    8: [6, 3, 5, 0, 4, 3, 7, 6, 7, 5, 4, 7, 1, 6, 3, 6],
}


def test_the_hash_is_the_documented_one():
    """The hash is XXH3-64 over little-endian bytes, with seed 0."""
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2
    assert xxhash.xxh3_64_digest((1).to_bytes(8, "little")).hex() == "2fbc593564db792e"


@pytest.mark.parametrize("shards", VECTORS)
def test_topic_ids_map_to_the_documented_shards(shards):
    """The vectors are those of the documentation and must never change."""
    assert [shard_of(topic_id, shards) for topic_id in range(1, 17)] == VECTORS[shards]


@pytest.mark.parametrize("shards", VECTORS)
def test_shards_of_agrees_with_shard_of(shards):
    ids = np.arange(1, 17)
    assert shards_of(ids, shards).tolist() == VECTORS[shards]
    assert shards_of(ids[::2], shards).tolist() == VECTORS[shards][::2]
    assert shards_of(ids[:0], shards).shape == (0,)


def test_the_largest_id_has_a_shard():
    top = (1 << 64) - 1
    assert shards_of(np.array([top], dtype=np.uint64), 7).tolist() == [shard_of(top, 7)]


def test_the_home_shard_is_the_hash_of_the_name():
    assert home_shard("orders", 8) == xxhash.xxh3_64_intdigest(b"orders") % 8
    assert {home_shard(f"t{i}", 4) for i in range(64)} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["a", "0", "Orders", "a.b_c:d-e", "x" * 255, "9:._-"])
def test_a_valid_name_is_accepted(name):
    """The name has 1 to 255 characters and starts with a letter or a digit."""
    check_topic_name(name)
    assert is_topic_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".a",
        "-a",
        "_a",
        ":a",
        "a b",
        "a/b",
        "../x",
        "a>b",
        "ü",
        "aü",
        "a\n",
        "a\0",
        "x" * 256,
        "a\u0661",
        "١",
    ],
)
def test_an_invalid_name_is_refused_with_the_field(name):
    """The error quotes at most 64 characters of the name."""
    assert not is_topic_name(name)
    with pytest.raises(InvalidRequest) as caught:
        check_topic_name(name)
    assert caught.value.detail["field"] == "topic"
    assert len(str(caught.value.detail["found"])) <= 64


@pytest.mark.parametrize("name", [None, 7, b"orders", ["a"]])
def test_a_name_that_is_no_string_is_refused(name):
    assert not is_topic_name(name)
    with pytest.raises(InvalidRequest) as caught:
        check_topic_name(name, "dead_letter")
    assert caught.value.detail["field"] == "dead_letter"
