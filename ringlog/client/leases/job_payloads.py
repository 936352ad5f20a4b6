"""Payloads of jobs: encoded from values, and tested for decoding before a program gets a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ringlog.client.leases.job_facts import JobFacts
from ringlog.client.read.pages import Record
from ringlog.client.write.fields import NewRecord
from ringlog.payload import RAW, PayloadCodec


def encode_payloads(jobs: Iterable[Any], codec: PayloadCodec[Any]) -> Iterable[Any]:
    """Encode the values of jobs to payloads. Record objects that were read before are passed on unchanged."""
    return jobs if codec is RAW else _encoded(jobs, codec)


def _encoded(jobs: Iterable[Any], codec: PayloadCodec[Any]) -> Iterator[Any]:
    for job in jobs:
        if isinstance(job, NewRecord):
            yield msgspec.structs.replace(job, data=codec.encode(job.data))
        else:
            yield job if isinstance(job, Record) else codec.encode(job)


def decode_failure(job: JobFacts[Any]) -> str | None:
    """Return why a job's payload cannot be decoded, or None. A codec of the program may raise any
    exception."""
    try:
        _ = job.value
    except Exception as e:  # noqa: BLE001  said in the reason of the rejection
        return f"the payload cannot be decoded: {type(e).__name__}: {e}"
    return None
