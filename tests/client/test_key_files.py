"""Sources of the secret key of a TCP connection, and errors for invalid key files and keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import ringlog
import ringlog.aio
from ringlog.cli.app import run
from ringlog.client.connection.client_options import ClientOptions
from ringlog.errors import UsageError
from ringlog.link.curve import key_file_text, new_key

SERVER, CLIENT = new_key(), new_key()
URL = f"ringlog://127.0.0.1:9?server_key={quote(SERVER.public, safe='')}"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A key file that is written as docs/explanation/security.md describes."""
    path = tmp_path / "client.key"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key_file_text(CLIENT))
    return path


def secret_of(key: str | None = None, url: str = URL) -> str:
    return ClientOptions(url, None, key, None, "auto").secret_key


def test_the_secret_key_comes_from_the_call_the_file_or_the_variable(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secret_of() == ""
    monkeypatch.setenv("RINGLOG_KEY", new_key().secret.decode())
    assert secret_of() == os.environ["RINGLOG_KEY"]
    monkeypatch.setenv("RINGLOG_KEY_FILE", str(key_file))
    assert secret_of() == CLIENT.secret.decode()
    other = new_key().secret.decode()
    assert secret_of(other) == other
    assert secret_of("") == ""


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.chmod(0o644), "RINGLOG_KEY_FILE: key file must not be accessible to other users"),
        (lambda path: path.unlink(), "RINGLOG_KEY_FILE: key file cannot be opened"),
        (lambda path: path.write_text(CLIENT.secret.decode()), "RINGLOG_KEY_FILE: key file is not TOML"),
        (lambda path: path.write_text(""), "RINGLOG_KEY_FILE: public_key must be 40 characters of Z85"),
        (lambda path: path.write_text(f'public_key = "{CLIENT.public.decode()}"\n'),
         "RINGLOG_KEY_FILE: secret_key must be 40 characters of Z85"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "RINGLOG_KEY_FILE: key file is not UTF-8"),
        (lambda path: path.write_text(key_file_text(CLIENT).replace(CLIENT.public.decode(), "0" * 40)),
         "RINGLOG_KEY_FILE: public_key does not match secret_key"),
    ],
    ids=["open", "missing", "bare secret", "empty", "public only", "no text", "foreign pair"],
)  # fmt: skip
def test_the_error_for_a_bad_key_file_names_the_defect_and_never_quotes_the_key(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], Any], text: str,
) -> None:  # fmt: skip
    spoil(key_file)
    monkeypatch.setenv("RINGLOG_KEY_FILE", str(key_file))
    for connect in (ringlog.connect, ringlog.aio.connect):
        with pytest.raises(UsageError) as refused:
            connect(URL)
        assert refused.value.message.startswith(text)
        assert refused.value.detail["file"] == str(key_file)
        assert CLIENT.secret.decode() not in str(refused.value)
    assert run(["--url", URL, "topic", "list"]) != 0
    said = capsys.readouterr().err
    assert text in said
    assert "internal" not in said


def test_a_local_client_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGLOG_KEY_FILE", str(tmp_path / "missing"))
    assert secret_of(url=f"ringlog://{tmp_path}/run") == ""


@pytest.mark.parametrize("key", ["short", "a" * 35 + "#####", "é" * 40, "\ud800" * 40, "x y" * 13 + "z"])
def test_a_malformed_key_is_refused_at_once(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^key must be 40 characters of Z85, .* got \d+ characters"):
        ringlog.connect(URL, key=key)
    if key.isascii():
        with pytest.raises(UsageError, match="server_key must be 40 characters of Z85"):
            ringlog.connect(f"ringlog://127.0.0.1:9?server_key={quote(key, safe='')}")
        monkeypatch.setenv("RINGLOG_KEY", key)
        with pytest.raises(UsageError, match=r"^RINGLOG_KEY must be 40 characters of Z85"):
            ringlog.connect(URL)
