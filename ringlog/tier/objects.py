"""ObjectStore: a bucket as the cold tier, through the package `obstore` (extra `cold`).

Every request has a timeout. Idempotent requests are retried a few times, with exponential backoff and jitter,
within that timeout. Credentials come from the environment, never from the configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ringlog.errors import ColdUnavailable, ConfigError
from ringlog.limits import COLD_RETRIES_MAX, MIB
from ringlog.storage.disk import Disk
from ringlog.tier.store import ColdMissing, Digest, file_pieces

SINGLE_PUT_BYTES_MAX = 8 * MIB
"""Up to this size (bytes) an object is sent in one request, above it in parts of this size."""
LIST_PAGE = 1_000


class ObjectStore:
    """A store.SegmentStore in a bucket, below the prefix of a URL such as `s3://bucket/prefix`."""

    is_durable_at_once: bool = True

    def __init__(self, disk: Disk, url: str, *, timeout_s: float, **options: Any) -> None:
        """`timeout_s` bounds each request in seconds. `options` are passed to obstore (endpoint, region, …).

        Raises ConfigError if obstore is not installed, or if it rejects the URL or an option.
        """
        self.url = url
        self._disk = disk
        self._api, self._failures = _load()
        refusals: tuple[type[Exception], ...] = (*self._failures, ValueError, TypeError)
        timeout = timedelta(seconds=timeout_s)
        client = {
            "timeout": timeout, "connect_timeout": timeout, "allow_http": _allows_http(),
            **options.pop("client_options", {}),
        }  # fmt: skip
        retry = {
            "max_retries": COLD_RETRIES_MAX,
            "retry_timeout": timeout,
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timeout, "base": 2},
        }
        try:
            self._store = self._api.store.from_url(url, client_options=client, retry_config=retry, **options)
        except refusals as e:
            raise ConfigError("cold.url: not a store that can be used", found=url, reason=str(e)) from None

    def put(self, name: str, source: str) -> str:
        digest = Digest()
        with contextlib.closing(file_pieces(self._disk, source, SINGLE_PUT_BYTES_MAX)) as pieces:
            first = next(pieces, b"")
            digest.add(first)
            with self._cold(name):
                if len(first) < SINGLE_PUT_BYTES_MAX:
                    self._api.put(self._store, name, first)
                else:
                    self._put_parts(name, first, pieces, digest)
        return digest.text

    def _put_parts(self, name: str, first: bytes, rest: Iterator[bytes], digest: Digest) -> None:
        # If the writer is left by an error, it aborts the upload. A partial object is never visible.
        with self._api.open_writer(
            self._store, name, buffer_size=SINGLE_PUT_BYTES_MAX, max_concurrency=2
        ) as writer:
            writer.write(first)
            for piece in rest:
                writer.write(digest.add(piece))

    def make_durable(self, name: str) -> None:
        """Do nothing: see is_durable_at_once."""

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        if start >= stop or start >= (size := self.size(name)):
            return b""
        with self._cold(name):
            return bytes(self._api.get_range(self._store, name, start=start, end=min(stop, size)))

    def size(self, name: str) -> int:
        with self._cold(name):
            return int(self._api.head(self._store, name)["size"])

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except ColdMissing:
            return False
        return True

    def list(self, prefix: str) -> Iterator[str]:
        with self._cold(prefix):
            for page in self._api.list(self._store, prefix=prefix, chunk_size=LIST_PAGE):
                yield from (str(found["path"]) for found in page)

    def delete(self, name: str) -> None:
        with self._cold(name), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, name)

    @contextlib.contextmanager
    def _cold(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ColdMissing("cold object does not exist", file=name) from None
        except self._failures as e:
            raise ColdUnavailable("cold store failed", file=name, error=_first_line(e)) from None


def _load() -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        api = importlib.import_module("obstore")
        store = importlib.import_module("obstore.store")
        exceptions = importlib.import_module("obstore.exceptions")
    except ImportError:
        raise ConfigError("cold.url needs the extra `cold`: pip install 'ringlog[cold]'") from None
    assert api.store is store
    return api, (exceptions.BaseError, OSError)


def _allows_http() -> bool:
    """Return the value of AWS_ALLOW_HTTP. obstore itself ignores it if client options are given."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true", "yes"}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
