"""The real keys file of a gateway: permissions, changes, and what is logged about it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ringlog.access.key_ring import key_id
from ringlog.access.key_sources import KEYS_POLL_NS
from ringlog.errors import ConfigError
from ringlog.link.keys_file import KEYS_FILE_BYTES_MAX, follow_keys


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.unlink(missing_ok=True)
    path.write_text(text)
    os.chmod(path, mode)
    return str(path)


def entry(key: str) -> str:
    return f'[[keys]]\nname = "{key}"\nbearer_sha256 = "{key_id(key)}"\n'


def test_a_changed_file_is_used_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    source = follow_keys(write(path, entry("one")))
    with caplog.at_level(logging.INFO, "ringlog.keys"):
        write(path, entry("two") + entry("three"))
        assert source.poll(KEYS_POLL_NS) is not None
        write(path, entry("four"), 0o644)
        assert source.poll(2 * KEYS_POLL_NS) is None
        path.unlink()
        assert source.poll(3 * KEYS_POLL_NS) is None
        assert source.poll(4 * KEYS_POLL_NS) is None
    assert source.keys.bearer.find("Bearer two") is not None
    assert [record.getMessage() for record in caplog.records] == [
        "keys changed",
        "keys file invalid, current keys stay in use",
        "keys file invalid, current keys stay in use",
    ]


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (entry("x"), 0o640, "accessible to other users"),
        ("x" * (KEYS_FILE_BYTES_MAX + 1), 0o600, "too large"),
        ("[", 0o600, "TOML"),
    ],
    ids=["readable-by-group", "too-large", "no-toml"],
)
def test_a_bad_file_at_the_start_is_an_error(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        follow_keys(write(tmp_path / "keys.toml", text, mode))


def test_a_missing_file_and_a_symbolic_link_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", entry("x"))
    os.symlink(path, tmp_path / "link")
    for wrong in ("absent", "link"):
        with pytest.raises(ConfigError):
            follow_keys(str(tmp_path / wrong))


def test_a_short_key_of_the_variable_is_logged_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ringlog.keys"):
        follow_keys("", "rl_long-enough-for-all,hunter2")
    (record,) = caplog.records
    assert record.facts == {"keys": ["env-2"]}  # type: ignore[attr-defined]
    assert "hunter2" not in repr(vars(record))
