"""Address of an engine: URLs, and the file engine.json in the run directory of a running engine."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from ringlog import environment
from ringlog.descriptors import descriptor_limit_message
from ringlog.envelope.engine_file import ENGINE_FILE, EngineInfo
from ringlog.errors import UsageError
from ringlog.link.curve import KEY_CHARS, is_public_key

DEFAULT_RUN_DIR = "ringlog-data/run"
_RULE = "ringlog:///run/directory or ringlog://host:port?server_key=<40 characters>"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL: a run directory on this host, or a TCP endpoint with the server's public key."""

    run_dir: str = ""
    endpoint: str = ""
    server_key: str = ""

    @property
    def is_local(self) -> bool:
        """The engine runs on this host."""
        return not self.endpoint

    def __str__(self) -> str:
        return f"ringlog://{self.run_dir}" if self.is_local else self.endpoint.replace("tcp", "ringlog", 1)


def parse_url(url: str | None) -> Address:
    """Parse a URL. None = RINGLOG_URL, or the default run directory. Raises UsageError."""
    if url is None:
        url = os.environ.get(environment.URL) or _default_url()
    if not isinstance(url, str):
        raise UsageError(f"url must be a str, got {type(url).__name__}", expected=_RULE)
    parts = _split(url)
    if parts.scheme != "ringlog":
        raise UsageError(f"url must start with ringlog://, got {url[:64]!r}", url=url, expected=_RULE)
    if not parts.netloc:
        if not parts.path.startswith("/"):
            raise UsageError(
                f"the run directory of a url must be an absolute path, got {parts.path[:64]!r}", url=url,
                expected=_RULE,
            )  # fmt: skip
        return Address(run_dir=unquote(parts.path).rstrip("/") or "/")
    return _remote(url)


def _default_url() -> str:
    try:
        return f"ringlog://{Path(DEFAULT_RUN_DIR).absolute()}"
    except FileNotFoundError:
        raise UsageError(
            f"the working directory was deleted: pass a url or set {environment.URL}",
            expected=_RULE,
        ) from None


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as e:
        # For example brackets without an address, or characters that normalize to a delimiter.
        raise UsageError(
            f"url is not valid, got {url[:64]!r}", url=url, reason=str(e), expected=_RULE
        ) from None


def _remote(url: str) -> Address:
    # The code splits the URL itself: a key may contain & # % + or ?, which a URL parser treats as delimiters.
    base, _, query = url.partition("?")
    parts = _split(base)
    try:
        port = parts.port
    except ValueError as e:
        raise UsageError(
            f"the port of a url must be a number from 0 to 65535, got {base[:64]!r}", url=url, reason=str(e)
        ) from None
    if port is None or not parts.hostname:
        raise UsageError(f"a remote url must name host and port, got {url[:64]!r}", url=url, expected=_RULE)
    server_key = _server_key(query) if query else ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(endpoint=f"tcp://{host}:{port}", server_key=server_key)


def _server_key(query: str) -> str:
    """Return the key of `server_key=…`, in the form that the engine prints or percent-encoded.

    40 characters are the key itself. An encoded key is longer if encoding changed any character.
    """
    name, equals, raw = query.partition("=")
    if name != "server_key" or not equals:
        raise UsageError(
            f"unknown option {name[:64]!r} in url: only server_key is allowed", option=name,
            known="server_key",
        )  # fmt: skip
    key = raw if len(raw) == KEY_CHARS else unquote(raw)
    if not is_public_key(key):
        raise UsageError(
            f"server_key must be 40 characters of Z85, percent-encoded, got {len(key)} characters",
            chars=len(key),
        )
    return key


def read_engine_file(run_dir: str) -> EngineInfo | None:
    """Read `engine.json` in `run_dir` or in its subdirectory `run`; None if there is no such file."""
    for directory in (Path(run_dir), Path(run_dir) / "run"):
        try:
            found = msgspec.json.decode((directory / ENGINE_FILE).read_bytes(), type=EngineInfo)
            return _with_gateway_in(directory, found)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise UsageError(
                "engine.json is not valid: check that the url names the run directory of a ringlog engine",
                run_dir=run_dir,
                reason=str(e),
            ) from None
        except PermissionError:
            raise UsageError(_not_ours(directory), run_dir=run_dir) from None
        except OSError as e:
            if e.errno in {errno.EMFILE, errno.ENFILE}:
                raise UsageError(descriptor_limit_message(), run_dir=run_dir) from None
            # The device fails. A caller that tries again finds the engine when the device works again.
            raise UsageError("engine.json cannot be read", run_dir=run_dir, reason=e.strerror) from None
    return None


def _not_ours(directory: Path) -> str:
    try:
        owner = f", it belongs to user {directory.stat().st_uid}"
    except OSError:
        owner = ""
    return (
        f"user {os.geteuid()} may not read the run directory{owner}: run program and engine as the same "
        "user, or connect over TCP"
    )


def _with_gateway_in(directory: Path, found: EngineInfo) -> EngineInfo:
    """Return `found` with the path of the gateway's socket in `directory`.

    An endpoint with a scheme stays as it is.
    """
    if not found.gateway_ipc or "://" in found.gateway_ipc:
        return found
    return msgspec.structs.replace(found, gateway_ipc=f"ipc://{directory.absolute() / found.gateway_ipc}")


def is_shared_memory_unreachable(engine: EngineInfo) -> bool:
    """Return True if the engine runs and this process cannot see its shared memory.

    This is the case for a program in another container that shares only the data volume. If the engine was
    killed, its shared memory may be missing as well, but then no gateway accepts connections.
    """
    if os.path.isdir(engine.shm_dir) or not engine.gateway_ipc:
        return False
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        probe.connect(engine.gateway_ipc.removeprefix("ipc://"))
    except OSError as e:
        return isinstance(e, BlockingIOError)
    finally:
        probe.close()
    return True
