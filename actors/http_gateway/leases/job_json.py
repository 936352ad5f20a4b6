"""Claimed jobs as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringlog.actors.http_gateway.records.record_json import data_json, data_texts, text_json
from ringlog.client.leases.claim_result import ClaimResult
from ringlog.client.read.pages import Record
from ringlog.frame.layout import Column

_US_PER_MS = 1_000


def job_rows(claimed: ClaimResult, begin: bytes = b"") -> list[bytes]:
    """Return the JSON object of each job of a claim. `begin` is put before the first field."""
    if claimed.leases is not None:
        return [
            b'{%b"$seq":%d,"lease_id":"lease_%016x","deadline":%d,"deliveries":%d,%b}'
            % (begin, record.seq, lease.token, lease.deadline_ms, deliveries, record_fields(record))
            for record, lease, deliveries in claimed.materialized()
        ]
    if not len(claimed):
        return []
    seqs, tokens, deliveries = claimed.columns()
    if len(claimed.batches) == 1:
        times, texts, before, after = _columns(claimed.batches[0])
    else:
        parts = [_columns(batch) for batch in claimed.batches]
        times, texts, before, after = ([each for part in parts for each in part[n]] for n in range(4))  # type: ignore[assignment]
    template = (
        b'{%b"$seq":%%d,"lease_id":"lease_%%016x","deadline":%d,"$ts":%%d,"deliveries":%%d%%b,"data":%%b%%b}'
        % (begin.replace(b"%", b"%%"), claimed.deadline_ms)
    )
    return list(
        map(template.__mod__, zip(seqs, tokens, times, deliveries, before, texts, after, strict=True))
    )


def _columns(batch: Any) -> tuple[Sequence[int], Sequence[bytes], Sequence[bytes], Sequence[bytes]]:
    """Return write times in ms, data, and the text before and after the data, one of each for each job."""
    times = (batch.commit_stamps // _US_PER_MS).tolist()
    before = after = [b""] * len(times)
    nodes, tags, metas = batch.column(Column.NODE), batch.column(Column.TAG), batch.column(Column.META)
    for name, values in ((b',"$node":', nodes), (b',"$tag":', tags)):
        if values is not None:
            before = [
                text + name + text_json(value) if value else text
                for text, value in zip(before, values, strict=True)
            ]
    if metas is not None:
        after = [b',"meta":' + data_json(meta) if meta else b"" for meta in metas]
    return times, data_texts(batch.payloads()), before, after


def record_fields(record: Record) -> bytes:
    """Return the fields of a record after its seq, as the inside of a JSON object."""
    fields = [b'"$ts":%d' % (record.ts // _US_PER_MS)]
    fields += [
        b'"%b":%b' % (name, msgspec.json.encode(text))
        for name, text in ((b"$node", record.node), (b"$tag", record.tag))
        if text
    ]
    fields.append(b'"data":%b' % data_json(record.data))
    if record.meta_json:
        fields.append(b'"meta":%b' % data_json(record.meta_json))
    return b",".join(fields)
