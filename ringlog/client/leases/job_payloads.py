"""Payloads of jobs: made from values, and found to be unreadable before a program has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ringlog.client.leases.job_facts import JobFacts
from ringlog.client.read.pages import Record
from ringlog.client.write.fields import NewRecord
from ringlog.payload import RAW, PayloadCodec


def encode_payloads(jobs: Iterable[Any], codec: PayloadCodec[Any]) -> Iterable[Any]:
    """Jobs to be put, with values as payloads; records that were read before are passed on as they are."""
    return jobs if codec is RAW else _encoded(jobs, codec)


def _encoded(jobs: Iterable[Any], codec: PayloadCodec[Any]) -> Iterator[Any]:
    for job in jobs:
        if isinstance(job, NewRecord):
            yield msgspec.structs.replace(job, data=codec.encode(job.data))
        else:
            yield job if isinstance(job, Record) else codec.encode(job)


def decode_failure(job: JobFacts) -> str | None:
    """Why a job's payload cannot be decoded, None when it can: a program's codec may raise anything."""
    try:
        _ = job.value
    except Exception as e:  # noqa: BLE001  said in the reason of the rejection
        return f"the payload cannot be decoded: {type(e).__name__}: {e}"
    return None
