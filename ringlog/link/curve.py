"""CURVE key files: the identity of a server or a client on a TCP connection.

A key file is TOML with `public_key` and, for the owner of the key, `secret_key`, both in Z85 (40 characters).
A file with a secret key must belong to the current user and have mode 0600, or it is refused.
"""

from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import dataclass, field

from ringlog.errors import ConfigError

KEY_CHARS = 40
_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FILE_BYTES_MAX = 4_096
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@dataclass(frozen=True, slots=True)
class CurveKey:
    """One key pair, or only a public key (then `secret` is empty)."""

    public: bytes
    secret: bytes = field(default=b"", repr=False)


def new_key() -> CurveKey:
    """Return a new random key pair. The public key does not begin with "-", as one in 85 does.

    Commands take it as the value of an option.
    """
    import zmq

    while True:
        public, secret = zmq.curve_keypair()
        if not public.startswith(b"-"):
            return CurveKey(public, secret)


def key_file_text(key: CurveKey) -> str:
    """Return the text of a key file. Write it with mode 0600 if it has the secret key."""
    lines = [f'public_key = "{key.public.decode()}"']
    if key.secret:
        lines.append(f'secret_key = "{key.secret.decode()}"')
    return "\n".join(lines) + "\n"


def read_key_file(path: str, *, needs_secret: bool) -> CurveKey:
    """Read and validate a key file.

    Raises ConfigError, which names the file and the fault, and never a key.
    """
    fields = _read_fields(path, is_private=needs_secret)
    public = fields.get("public_key")
    secret = fields.get("secret_key", "")
    if not is_public_key(public):
        raise ConfigError("public_key must be 40 characters of Z85: create the key file again", file=path)
    if needs_secret:
        if not is_public_key(secret):
            raise ConfigError("secret_key must be 40 characters of Z85: create the key file again", file=path)
        _require_pair(path, str(public), str(secret))
    return CurveKey(str(public).encode(), str(secret).encode() if needs_secret else b"")


def read_private_text(path: str, bytes_max: int) -> str:
    """Read a file that other users can neither read nor change. Raises ConfigError otherwise."""
    return _read(path, bytes_max, is_private=True)


def is_public_key(text: object) -> bool:
    """Return True for a key in Z85: 40 characters, and each group of five is a number below 2^32."""
    if not isinstance(text, str) or len(text) != KEY_CHARS or not set(text) <= set(_Z85):
        return False
    return all(_number_of(text[at : at + 5]) < 1 << 32 for at in range(0, KEY_CHARS, 5))


def _number_of(group: str) -> int:
    number = 0
    for character in group:
        number = number * len(_Z85) + _Z85.index(character)
    return number


def _read_fields(path: str, *, is_private: bool) -> dict[str, object]:
    try:
        return tomllib.loads(_read(path, _FILE_BYTES_MAX, is_private=is_private))
    except tomllib.TOMLDecodeError:
        # The parser's message may quote the line, which may contain the secret key.
        raise ConfigError(
            'key file is not TOML: it needs a line public_key = "…" and, for the owner, secret_key = "…"',
            file=path,
        ) from None


def _read(path: str, bytes_max: int, *, is_private: bool) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | _NO_LINK_NO_WAIT)
    except OSError as e:
        raise ConfigError("key file cannot be opened", file=path, reason=e.strerror) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise ConfigError("key file is not a regular file", file=path)
    with open(fd, "rb") as file:
        if not hasattr(os, "geteuid"):
            is_private = False  # Windows: access control lists decide which user may read it.
        if is_private and status.st_mode & 0o077:
            raise ConfigError(
                "key file must not be accessible to other users: chmod 600", file=path,
                mode=oct(status.st_mode & 0o777), needs="0o600",
            )  # fmt: skip
        if is_private and status.st_uid != os.geteuid():
            raise ConfigError(
                f"key file must belong to user {os.geteuid()}, and belongs to user {status.st_uid}",
                file=path, uid=status.st_uid,
            )  # fmt: skip
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ConfigError(
            f"key file is too large, it must have at most {bytes_max} bytes", file=path, max=bytes_max
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError("key file is not UTF-8", file=path) from None


def _require_pair(path: str, public: str, secret: str) -> None:
    import zmq

    if zmq.curve_public(secret.encode()) != public.encode():
        raise ConfigError("public_key does not match secret_key: create the key file again", file=path)
