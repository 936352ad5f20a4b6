"""A snapshot row that the engine cannot decode is damage for the verifier too."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.errors import CorruptData
from ringlog.topic.config import TopicConfig
from ringlog.topic.routers import Router
from ringlog.topic.row import decode_row, encode_row
from ringlog.topic.state import ShardTopic
from ringlog.verify.frame_decoder import VerifyError
from ringlog.verify.snapshot_decoder import decode_topic_row


def topic(router: dict[str, Any]) -> ShardTopic:
    made = ShardTopic(1, 1, "t", TopicConfig.parse({"priority": -5}))
    facts: dict[str, Any] = {
        "number": 7, "name": "r", "source": "s", "source_id": 2, "source_epoch": 1, "flags": 3, "filter": "",
        "cursor": 0,
    }  # fmt: skip
    made.routers = {7: Router(**(facts | router))}
    return made


def test_engine_and_verifier_read_a_valid_row() -> None:
    data = encode_row(topic({}))
    assert decode_row(1, data).routers[7].name == "r"
    assert decode_topic_row(1, data).name == "t"


@pytest.mark.parametrize(
    "router",
    [
        {"source_id": -1}, {"source_epoch": -1}, {"flags": -1}, {"cursor": -1}, {"forwarded": -1},
        {"number": -1}, {"name": 5}, {"cursor": "0"},
    ],
    ids="".join,
)  # fmt: skip
def test_a_row_with_an_impossible_router_is_refused_by_both(router: dict[str, Any]) -> None:
    """`verify` once reported no damage, and every start of the shard failed."""
    data = encode_row(topic(router))
    with pytest.raises(CorruptData):
        decode_row(1, data)
    with pytest.raises(VerifyError):
        decode_topic_row(1, data)
