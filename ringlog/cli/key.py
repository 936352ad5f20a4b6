"""`ringlog key`: create, list and revoke the keys of HTTP clients (bearer) and of TCP clients (CURVE).

The keys file gets the public half: the digest of a bearer key, or the public CURVE key. The secret half is
printed once, or written into a file of its own. An engine reads a changed keys file within 2 s.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from ringlog.access.key_ring import KeyEntry, KeyKind, key_id
from ringlog.access.key_sources import BEARER_RANDOM_BYTES, bearer_key, parse_keys
from ringlog.access.keys_text import entry_text, with_entry, without_entries
from ringlog.access.permissions import SCOPES
from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.config_sources import load_config
from ringlog.errors import ConfigError, UsageError
from ringlog.link.curve import is_public_key, key_file_text, new_key, read_key_file
from ringlog.link.keys_file import PrivateKeysFile

if TYPE_CHECKING:
    from ringlog.storage.disk import Disk

Given = Annotated[Options, Parameter(parse=False)]
Scopes = Annotated[tuple[str, ...], Parameter(name="--scope", negative=())]
Prefixes = Annotated[tuple[str, ...], Parameter(name="--prefix", negative=())]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HTTP_PORT = 4000
_LOCK_POLL_S = 0.02


def new(
    name: str,
    *,
    kind: KeyKind = KeyKind.BEARER,
    scopes: Scopes = (),
    prefixes: Prefixes = (),
    file: str | None = None,
    out: str | None = None,
    public_key: str | None = None,
    config: str | None = None,
    options: Given,
) -> None:
    """Create a key and add it to the keys file. The secret is printed once.

    An engine that reads the file admits the key within 2 s, without a restart.

    Parameters
    ----------
    name
        Name of the client, for logs and limits: letters, digits and . _ @ -.
    kind
        Kind of key: bearer for HTTP, curve for ringlog:// over TCP.
    scopes
        Scope: read, write, delete or admin; may be given several times (default: all four).
    prefixes
        Prefix of the topic names that the key may use; may be given several times (default: every topic).
    file
        Keys file (default: the setting auth.keys_file). It is created if it does not exist.
    out
        New file for the secret, with mode 0600. The secret is then not printed.
    public_key
        Public key of a client that ran `ringlog key pair` itself. Its secret stays with the client.
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, /etc/ringlog/ringlog.toml).

    Examples
    --------
    ringlog key new web --scope read --scope write --prefix orders. --file keys.toml
    ringlog key new billing --kind curve --out billing.key --file keys.toml
    """
    _require_rights(name, scopes, prefixes)
    if public_key is not None:
        kind = KeyKind.CURVE
        _require_public(public_key, out)
    settings = _Settings.load(config)
    path = settings.keys_file_or(file)
    made = _made(kind) if public_key is None else _MadeKey(public_key)
    entry = entry_text(name, kind, made.listed, scopes, prefixes)
    with _changing(path, options):
        _add_entry(path, name, entry, out, made.secret_file)
    facts: dict[str, Any] = {
        "name": name, "kind": kind.value, "scopes": list(scopes) or sorted(SCOPES),
        "prefixes": list(prefixes), "keys_file": path,
    }  # fmt: skip
    if out is not None:
        facts["key_file"] = out
    elif made.secret:
        facts["key"] = made.secret
    facts["use"] = settings.curl(out) if kind is KeyKind.BEARER else settings.connect(out)
    options.printer().item(facts)
    _warn_unless_used(settings, path, options)


def _require_rights(name: str, scopes: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
    """Raise UsageError for a name, scope or prefix that no key can have."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"NAME must begin with a letter or digit and have at most 64 of these and . _ @ -, got {name!r}"
        )
    for scope in scopes:
        if scope not in SCOPES:
            raise UsageError(f"--scope must be one of {', '.join(sorted(SCOPES))}, got {scope!r}")
    if not all(prefixes):
        raise UsageError("--prefix must not be empty: omit it to allow every topic")


def _require_public(public_key: str, out: str | None) -> None:
    """Raise UsageError for a public key that is none, or whose secret is to be written."""
    if not is_public_key(public_key):
        raise UsageError("--public-key must be 40 characters of Z85, as `ringlog key pair` prints them")
    if out is not None:
        raise UsageError("give one of --out and --public-key: only the client has the secret")


def _add_entry(path: str, name: str, entry: str, out: str | None, secret_file: str) -> None:
    """Add an entry to the keys file, and create the file with the secret, or do neither."""
    disk = _disk()
    text = _text_of(path) if os.path.lexists(path) else ""
    if any(each.principal.name == name for each in parse_keys(text, path)):
        raise UsageError(f"key {name!r} exists in {path}: revoke it first, or choose another name")
    changed = with_entry(text, entry, path)
    if out is not None:
        _create(disk, out, secret_file)
    try:
        _replace(disk, path, changed)
    except BaseException:
        if out is not None:
            disk.unlink(out)  # No key file without an entry in the keys file.
        raise


def list_keys(*, file: str | None = None, config: str | None = None, options: Given) -> None:
    """List the keys of the keys file with their rights. Secrets are never shown.

    Parameters
    ----------
    file
        Keys file (default: the setting auth.keys_file).
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, /etc/ringlog/ringlog.toml).

    Examples
    --------
    ringlog key list --file keys.toml
    """
    path = _Settings.load(config).keys_file_or(file)
    options.printer().rows([_listed(each) for each in parse_keys(_text_of(path), path)])


def revoke(
    name: str,
    *,
    file: str | None = None,
    config: str | None = None,
    yes: Yes = False,
    options: Given,
) -> int:
    """Remove a key from the keys file. This cannot be undone.

    The engine refuses the key within 2 s, also on open connections.

    Parameters
    ----------
    name
        Name of the key, as `ringlog key list` prints it.
    file
        Keys file (default: the setting auth.keys_file).
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, /etc/ringlog/ringlog.toml).
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog key revoke web --file keys.toml --yes
    """
    asks = needs_confirmation(yes=yes)
    path = _Settings.load(config).keys_file_or(file)
    if asks and (count := _count(path, name)):
        require_confirmation(f"Remove {counted(count, 'key')} named {name} from {path}?")
    with _changing(path, options):
        count = _count(path, name)
        if count:
            _replace(_disk(), path, without_entries(_text_of(path), name, path))
    options.printer().item({"name": name, "revoked": count, "keys_file": path})
    return CliExit.DONE if count else CliExit.NOT_FOUND


def pair(out: str, *, options: Given) -> None:
    """Create a CURVE key pair in a new file: for a server, or for a client on its own host.

    A server with a TCP endpoint needs one (native.curve_key_file). A client that creates its pair itself
    sends the public key to the operator, who runs `ringlog key new NAME --public-key=KEY`.

    Parameters
    ----------
    out
        New file for both keys, with mode 0600.

    Examples
    --------
    ringlog key pair server.key
    """
    key = new_key()
    _create(_disk(), out, key_file_text(key))
    public = key.public.decode()
    options.printer().item(
        {
            "key_file": out, "public_key": public,
            "url": f"ringlog://HOST:PORT?server_key={quote(public, safe='')}",
        }
    )  # fmt: skip


# -- the two halves of a key ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MadeKey:
    """A new key: what the keys file lists, and the secret as text and as a file."""

    listed: str
    secret: str = ""
    secret_file: str = ""


def _made(kind: KeyKind) -> _MadeKey:
    if kind is KeyKind.BEARER:
        secret = bearer_key(os.urandom(BEARER_RANDOM_BYTES))
        return _MadeKey(key_id(secret), secret, secret + "\n")
    key = new_key()
    return _MadeKey(key.public.decode(), key.secret.decode(), key_file_text(key))


def _listed(entry: KeyEntry) -> dict[str, Any]:
    principal = entry.principal
    return {
        "name": principal.name, "kind": entry.kind.value, "scopes": sorted(principal.scopes),
        "prefixes": list(principal.prefixes),
    }  # fmt: skip


# -- settings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings of the engine that the commands need, by name."""

    values: dict[str, Any]

    @classmethod
    def load(cls, config: str | None) -> _Settings:
        return cls({key: value for key, value, _ in load_config(config_file=config).rows()})

    def keys_file_or(self, file: str | None) -> str:
        path = file or self.values["auth.keys_file"]
        if not path:
            raise UsageError("no keys file is configured: give --file, or set auth.keys_file")
        return os.path.abspath(path)

    def curl(self, key_file: str | None) -> str:
        """Return the curl line for a bearer key. The key stays out of the history of the shell."""
        scheme = "https" if self.values.get("http.tls_cert_file") else "http"
        host = _reachable(str(self.values.get("http.host") or "127.0.0.1"))
        port = self.values.get("http.port") or _HTTP_PORT
        key = "$KEY" if key_file is None else f"$(cat {shlex.quote(key_file)})"
        return f'curl -H "Authorization: Bearer {key}" {scheme}://{host}:{port}/v0/topics'

    def connect(self, key_file: str | None) -> str:
        """Return the command line for a CURVE key, with the URL of the server as far as it is known."""
        variable = "RINGLOG_KEY=$KEY" if key_file is None else f"RINGLOG_KEY_FILE={shlex.quote(key_file)}"
        endpoint = str(self.values["native.endpoint"])
        place = endpoint.removeprefix("tcp://") if endpoint.startswith("tcp://") else "HOST:PORT"
        host, _, port = place.rpartition(":")
        url = f"ringlog://{_reachable(host)}:{port}?server_key={self._server_key()}"
        return f"{variable} ringlog topic list --url '{url}'"

    def _server_key(self) -> str:
        try:
            key = read_key_file(str(self.values["native.curve_key_file"]), needs_secret=False)
        except ConfigError:
            return "SERVER_KEY"
        return quote(key.public.decode(), safe="")


def _reachable(host: str) -> str:
    """Return the host for a URL; a placeholder for the addresses of all interfaces."""
    if host in {"*", "0.0.0.0", "::", "[::]"}:
        return "HOST"
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _warn_unless_used(settings: _Settings, path: str, options: Options) -> None:
    if settings.values["auth.keys_file"] != path and not options.is_quiet:
        print(f"warning: the engine reads this file only with auth.keys_file = {path!r}", file=sys.stderr)


# -- files ------------------------------------------------------------------------------------------------


def _disk() -> Disk:
    from ringlog.storage.real_disk import RealDisk

    return RealDisk()


def _text_of(path: str) -> str:
    return PrivateKeysFile(path).read()


def _count(path: str, name: str) -> int:
    return sum(each.principal.name == name for each in parse_keys(_text_of(path), path))


def _create(disk: Disk, path: str, text: str) -> None:
    """Create a file with mode 0600. Raises DiskError if it exists."""
    fd = disk.create(path)
    try:
        disk.write_at(fd, [text.encode()], 0)
        disk.sync_file(fd)
    finally:
        disk.close(fd)
    disk.sync_dir(os.path.dirname(os.path.abspath(path)))


def _replace(disk: Disk, path: str, text: str) -> None:
    from ringlog.storage.disk import replace_file

    replace_file(disk, os.path.dirname(path), os.path.basename(path), text.encode())


@contextmanager
def _changing(path: str, options: Options) -> Iterator[None]:
    """Lock the directory of the keys file, so that no change of another `ringlog key` command is lost."""
    try:
        fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise ConfigError(
            "directory of the keys file cannot be opened", file=path, reason=e.strerror
        ) from None
    try:
        deadline_ns = options.clock.monotonic_ns() + round(options.timeout_s * 1e9)
        while not _locks(fd):
            if options.clock.monotonic_ns() > deadline_ns:
                raise UsageError(f"another command is changing {path}: nothing was changed, try again")
            options.clock.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
