"""What a worker does: deliver an email. Run by `ringlog worker mail:deliver`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from ringlog.client import msgspec_codec
from ringlog.worker import Reject, current_job

OUTBOX = Path("outbox")
"""Stands for a mail server. An email's number is its name there: a second delivery changes nothing."""


class Email(msgspec.Struct):
    """What is put into the queue."""

    number: int
    to: str
    text: str


EMAIL = msgspec_codec(Email)


def deliver(email: Email) -> None:
    """Deliver an email: at least once, and if a worker was killed in the middle once more."""
    if "@" not in email.to:
        raise Reject("no address")
    time.sleep(0.01)  # The mail server takes its time.
    letter = OUTBOX / f"{email.number:04}"
    new = letter.with_suffix(f".{os.getpid()}")
    new.write_text(f"To: {email.to}\n\n{email.text}\n")
    new.rename(letter)
    with (OUTBOX / "log").open("a") as log:
        log.write(f"{email.number} {current_job().deliveries}\n")
