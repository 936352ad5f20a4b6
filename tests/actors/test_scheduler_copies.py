"""The copies that a forward batch makes of a source, compared with the records one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.actors.scheduler.forwarding.forward_batch import (
    ORIGINAL,
    STAMP,
    build_forward_batch,
    stamped_meta,
)
from ringlog.actors.scheduler.forwarding.forwarding_core import (
    CopyTransform,
    ForwardBatch,
    ForwardingCore,
    ReadForwardBatch,
    SendRoute,
    SourceFlowKey,
)
from ringlog.client.read.fetch_result import FetchResult
from ringlog.envelope import messages as m
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame, layout, open_frame
from ringlog.frame.measure import measure
from ringlog.limits import META_KEYS_MAX, ROUTE_BYTES_MAX, ROUTE_RECORDS_MAX, ROUTER_HOPS_MAX
from ringlog.storage.frame_run import FrameRun
from ringlog.topic.routers import RouterFlag, RouterPassOutcome
from ringlog.topic.tombstone import Gap
from ringlog.types import Codec, PayloadKind

KEEPS = int(RouterFlag.PRESERVE_NODE | RouterFlag.PRESERVE_TAG)
PLAIN = CopyTransform("", KEEPS, "")
DEEP = b"[" * 8_000 + b"]" * 8_000


def run_of(*sent: dict[str, Any], hops: tuple[int, ...] = ()) -> FrameRun:
    """Return a run of frames from seq 1 on.

    Each frame is given as arguments of `encode_records`, plus `codec` and `kind`.
    """
    parts: list[bytearray] = []
    base = 1
    for number, given_ in enumerate(sent):
        columns = {name: value for name, value in given_.items() if name not in {"codec", "kind"}}
        made = frame(
            encode_records(**columns), topic_id=1, codec=given_.get("codec", Codec.NONE),
            payload_kind=given_.get("kind", PayloadKind.BYTES),
        )  # fmt: skip
        words = frames.words_of(made)
        words[layout.W_BASE_SEQ] = base
        words[layout.W_TAIL] |= np.uint64((hops[number] if hops else 0) << layout.HOPS_SHIFT)
        base += len(columns["payloads"])
        parts.append(made)
    buffer = b"".join(parts)
    return FrameRun(buffer, frames.scan(buffer), 0, "", 0)


def asked(
    *changes: CopyTransform, start: int = 0, until: int = 1 << 40, records: int = ROUTE_RECORDS_MAX,
    size: int = ROUTE_BYTES_MAX,
) -> ReadForwardBatch:  # fmt: skip
    return ReadForwardBatch(
        SourceFlowKey(7, False), "source", 3, start, until, records, size, changes or (PLAIN,), (1,)
    )


def portion(
    *runs: FrameRun, after: int = 0, hidden: tuple[int, ...] = (), gap: Gap | None = None
) -> FetchResult:
    last = max((run.last_seq for run in runs), default=after)
    return FetchResult(3, last, 1, gap, after, runs, last, np.array(hidden, dtype=np.int64))


def records(found: ForwardBatch, change: CopyTransform = PLAIN) -> list[tuple[Any, ...]]:
    """Return the records that are copied under a transform, value by value."""
    if change not in found.frame_of:
        return []
    view = open_frame(found.frames[found.frame_of[change]], seed=0)
    made = view.records()
    count = len(made.payloads)
    columns = (
        made.payloads, made.keys, made.tags, made.nodes, made.headers, made.metas, made.event_ts,
        made.expires_at, made.not_before, made.priorities,
    )  # fmt: skip
    filled = [list(column) if column is not None else [None] * count for column in columns]
    return list(zip(*filled, strict=True))


_tag = st.sampled_from(["", "hot", "hot.1", "cold", "größe"])
_frame = st.integers(1, 6).flatmap(
    lambda n: st.fixed_dictionaries(
        {"payloads": st.lists(st.binary(max_size=12), min_size=n, max_size=n)},
        optional={
            "keys": st.lists(st.binary(max_size=4), min_size=n, max_size=n),
            "tags": st.lists(_tag, min_size=n, max_size=n),
            "nodes": st.lists(st.sampled_from(["", "n1"]), min_size=n, max_size=n),
            "metas": st.lists(st.sampled_from([b"", b'{"a":1}']), min_size=n, max_size=n),
            "event_ts": st.lists(st.integers(0, 99), min_size=n, max_size=n),
            "priorities": st.lists(st.integers(0, 255), min_size=n, max_size=n),
            "headers": st.lists(
                st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2),
                min_size=n,
                max_size=n,
            ),
            "codec": st.sampled_from(list(Codec)),
        },
    )
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.lists(_frame, min_size=1, max_size=8), st.data())
def test_a_batch_copies_the_requested_records_and_reports_its_end(sent, data):
    """Any frames, ranges, limits, hidden records and filters."""
    run = run_of(*sent)
    total = run.last_seq
    start = data.draw(st.integers(0, total - 1))
    until = data.draw(st.integers(start + 1, total + 3))
    most = data.draw(st.integers(1, 20))
    hidden = tuple(sorted(data.draw(st.sets(st.integers(1, total)))))
    bare = CopyTransform("", 0, "")
    hot = CopyTransform("^hot", KEEPS, "")
    found = build_forward_batch(
        asked(PLAIN, bare, hot, start=start, until=until, records=most),
        portion(run, after=start, hidden=hidden),
    )
    everything = []
    for each in sent:
        for n, payload in enumerate(each["payloads"]):

            def value(name: str, absent: Any = None) -> Any:
                return each[name][n] if name in each else absent  # noqa: B023

            everything.append(
                (
                    payload,
                    value("tags") or "",
                    value("nodes") or "",
                    value("keys") or b"",
                    value("headers") or [],
                    value("metas") or b"",
                    value("priorities", 0),
                )
            )
    shown = [seq for seq in range(start + 1, min(until, total) + 1) if seq not in hidden]
    taken = shown[:most]
    assert found.stop == (min(until, total) if len(shown) <= most else shown[most] - 1)
    assert found.hops == 1
    expected = [everything[seq - 1] for seq in taken]

    def plain(rows):
        return [(r[0], r[2] or "", r[3] or "", r[1] or b"", r[4] or [], r[5] or b"", r[9] or 0) for r in rows]

    assert plain(records(found)) == expected
    assert plain(records(found, bare)) == [(e[0], "", "", *e[3:]) for e in expected]
    assert plain(records(found, hot)) == [e for e in expected if e[1].startswith("hot")]


def test_a_batch_ends_where_payload_kind_or_hops_differ():
    kinds = run_of({"payloads": [b"1", b"2"]}, {"payloads": [b"3"], "kind": PayloadKind.JSON})
    found = build_forward_batch(asked(), portion(kinds))
    assert (found.stop, [row[0] for row in records(found)]) == (2, [b"1", b"2"])
    found = build_forward_batch(asked(start=2), portion(kinds, after=2))
    assert (found.stop, [row[0] for row in records(found)]) == (3, [b"3"])
    hops = run_of({"payloads": [b"1"]}, {"payloads": [b"2"]}, {"payloads": [b"3"]}, hops=(2, 2, 5))
    found = build_forward_batch(asked(), portion(hops))
    assert (found.stop, found.hops, len(records(found))) == (2, 3, 2)
    found = build_forward_batch(asked(start=2), portion(hops, after=2))
    assert (found.stop, found.hops) == (3, 6)


def test_records_that_passed_too_many_routers_are_not_copied():
    """The batch advances past them."""
    run = run_of({"payloads": [b"far"]}, {"payloads": [b"near"]}, hops=(ROUTER_HOPS_MAX, ROUTER_HOPS_MAX - 1))
    found = build_forward_batch(asked(), portion(run))
    assert (found.stop, found.frames) == (1, ())
    found = build_forward_batch(asked(start=1), portion(run, after=1))
    assert (found.stop, found.hops, len(found.frames)) == (2, ROUTER_HOPS_MAX, 1)


def test_the_bytes_of_a_batch_are_bounded_and_it_contains_at_least_one_record():
    run = run_of({"payloads": [b"x" * 100] * 10})
    assert build_forward_batch(asked(size=350), portion(run)).stop == 3
    assert build_forward_batch(asked(size=10), portion(run)).stop == 1


@pytest.mark.parametrize(("reason", "lost"), [("cap", 4), ("mixed", 4), ("restart_loss", 4), ("ttl", 0)])
def test_lost_records_are_counted_unless_they_expired(reason: str, lost: int):
    """The batch advances past the gap."""
    gap = Gap(3, 6, reason)
    found = build_forward_batch(asked(start=2), portion(run_of({"payloads": [b"x"] * 9}), after=6, gap=gap))
    assert found == ForwardBatch(6, lost)


def test_stamps_name_the_origin_of_a_record_and_lose_no_metadata():
    """Metadata that has no space for a stamp, or is no object, moves into a field of its own."""
    decode = msgspec.json.decode
    stamp = decode(stamped_meta(b"", "r", "s", 5, 2, 9))[STAMP]
    assert stamp == {
        "idempotency_key": "router:r:5:2:9", "router": "r", "source_topic": "s", "source_topic_id": 5,
        "source_epoch": 2, "source_seq": 9,
    }  # fmt: skip
    kept = decode(stamped_meta(b'{"a": [1, 2]}', "r", "s", 5, 2, 9))
    assert kept["a"] == [1, 2]
    full = msgspec.json.encode({f"k{n}": n for n in range(META_KEYS_MAX)})
    moved = stamped_meta(full, "r", "s", 5, 2, 9)
    assert decode(moved)[ORIGINAL] == decode(full)
    again = decode(stamped_meta(moved, "r2", "t", 6, 1, 1))
    assert again[ORIGINAL] == decode(full)
    assert again[STAMP]["router"] == "r2"
    assert decode(stamped_meta(b"[1]", "r", "s", 5, 2, 9))[ORIGINAL] == [1]
    stamped = CopyTransform("", KEEPS, "r")
    run = run_of(
        {"payloads": [b"x", b"y"], "metas": [b'{"a":1}', b""]}, {"payloads": [b"z"], "codec": Codec.LZ4}
    )
    found = build_forward_batch(asked(stamped, PLAIN), portion(run))
    assert [decode(row[5])[STAMP]["source_seq"] for row in records(found, stamped)] == [1, 2, 3]
    assert [row[0] for row in records(found, stamped)] == [b"x", b"y", b"z"]
    assert [row[5] or b"" for row in records(found)] == [b'{"a":1}', b"", b""]


@pytest.mark.parametrize(
    "meta",
    [b"no JSON", b'{"a":', b'"\\q"', b'{"a":' + DEEP + b"}", DEEP],
    ids=["text", "truncated", "invalid escape", "deep object", "deep array"],
)
def test_a_copy_has_valid_metadata_whatever_a_client_wrote(meta: bytes):
    """The shard checks only its length and that it is UTF-8. Other clients need not write JSON."""
    fields = msgspec.json.decode(stamped_meta(meta, "r", "s", 5, 2, 9), type=dict[str, msgspec.Raw])
    assert msgspec.json.decode(fields.pop(STAMP))["source_seq"] == 9
    [(name, kept)] = fields.items()
    if name == ORIGINAL and bytes(kept).startswith(b'"'):
        assert msgspec.json.decode(kept) == meta.decode()
    else:  # An interpreter that decodes more levels.
        assert bytes(kept) in meta


@pytest.mark.parametrize("payloads", [[b"x"] * 40, [b""] * 40, [b"x" * (n * 37 % 150) for n in range(40)]])
@pytest.mark.parametrize("room", [330, 2_000, 1 << 20], ids=["for one", "for some", "for all"])
def test_a_router_with_stamps_fills_a_destination_that_refuses_what_exceeds_its_room(payloads, room):
    """The room counts the stamps. A refused pass is followed by smaller ones, down to a single record."""
    core = ForwardingCore(1)
    stamped = KEEPS | int(RouterFlag.EXACTLY_ONCE)
    core.put_router(m.RouterFacts(1, "orders->audit", "orders", 7, 3, "audit", 2, stamped, "", 0, 0, 2))
    run, cursor, copied, refused = run_of({"payloads": payloads}), 0, [], 0
    core.grant_received(SourceFlowKey(7, False), len(payloads))
    while core.effects:
        effects, core.effects = core.effects, []
        for effect in effects:
            if isinstance(effect, ReadForwardBatch):
                core.batch_read(effect, build_forward_batch(effect, portion(run, after=effect.start)))
            elif isinstance(effect, SendRoute):
                [row], [content] = effect.message.rows, effect.frames
                size = int(measure(content, frames.scan(content)).accounted[0])
                count = len(open_frame(content, seed=0).records().payloads)
                if size > room:  # As a shard with discard = "reject" answers.
                    refused += 1
                    reply = m.RoutedRow(RouterPassOutcome.FULL, cursor, 2, count, room)
                else:
                    copied, cursor, refused = [*copied, count], row.stop, 0
                    reply = m.RoutedRow(RouterPassOutcome.DONE, cursor, 2)
                assert refused <= 12
                core.route_answered(effect.message, [reply])
        core.check()
    assert cursor == sum(copied) == len(payloads)
    assert core.next_deadline_ns() is None, "it never waited"
