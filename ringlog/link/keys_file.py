"""The keys file of an engine, as the gateways follow it: the real file for `access.key_sources.KeySource`."""

from __future__ import annotations

import logging
import os

from ringlog.access.key_ring import Keys
from ringlog.access.key_sources import KeySource
from ringlog.errors import ConfigError
from ringlog.link.curve import read_private_text
from ringlog.logs import log_event

log: logging.Logger = logging.getLogger("ringlog.keys")

KEYS_FILE_BYTES_MAX = 16 << 20


class PrivateKeysFile:
    """A keys file on this host, which only its owner may read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def state(self) -> tuple[int, int, int] | None:
        """Return the file's time of change, inode and size; None if there is no file."""
        try:
            facts = os.stat(self.path)
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_ino, facts.st_size

    def read(self) -> str:
        """Return the text. Raises ConfigError if it cannot be read, or if other users can read it."""
        return read_private_text(self.path, KEYS_FILE_BYTES_MAX)


def follow_keys(keys_file: str, api_keys: str = "") -> KeySource:
    """Load the keys of a gateway. A change of the file is logged; an invalid file changes nothing.

    Raises ConfigError if the keys are invalid now.

    Args:
        keys_file: The setting `auth.keys_file`; "" = none.
        api_keys: The variable RINGLOG_API_KEYS; "" for a gateway without bearer keys.
    """

    def on_error(error: ConfigError) -> None:
        log_event(log, logging.ERROR, "keys file invalid, current keys stay in use", reason=str(error))

    def on_change(keys: Keys) -> None:
        log_event(log, logging.INFO, "keys changed", keys=len(keys))

    file = PrivateKeysFile(keys_file) if keys_file else None
    found = KeySource(file, api_keys, on_error, on_change)
    if found.short_keys:
        log_event(log, logging.WARNING, "bearer key is short and may be guessed", keys=found.short_keys)
    return found
