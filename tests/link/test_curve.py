"""CURVE key files: content, permissions, and errors that never quote a key."""

import os

import pytest
import zmq

from ringlog.errors import ConfigError
from ringlog.link.curve import CurveKey, is_public_key, key_file_text, new_key, read_key_file

ANNE, BERT = new_key(), new_key()


def _write(path, text, mode=0o600):
    path.write_text(text)
    os.chmod(path, mode)
    return str(path)


def test_a_key_file_can_be_read_back(tmp_path):
    path = _write(tmp_path / "server.key", key_file_text(ANNE))
    assert read_key_file(path, needs_secret=True) == ANNE
    public = _write(tmp_path / "server.pub", key_file_text(CurveKey(ANNE.public)), 0o644)
    assert read_key_file(public, needs_secret=False) == CurveKey(ANNE.public)
    assert ANNE.secret.decode() not in repr(ANNE)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (key_file_text(ANNE), 0o640, "accessible to other users"),
        (key_file_text(ANNE), 0o604, "accessible to other users"),
        (key_file_text(CurveKey(ANNE.public)), 0o600, "secret_key"),
        (key_file_text(CurveKey(BERT.public, ANNE.secret)), 0o600, "does not match"),
        ("secret_key = " + ANNE.secret.decode(), 0o600, "TOML"),
        ("x" * 5000, 0o600, "too large"),
    ],
    # Keys are random in every process, but the ids of tests must not change.
    ids=["readable-by-group", "readable-by-all", "public-only", "foreign-pair", "no-toml", "too-large"],
)
def test_a_bad_key_file_is_refused_without_quoting_it(tmp_path, text, mode, says):
    """Neither a wrong mode nor wrong content puts the secret key into the error."""
    path = _write(tmp_path / "k", text, mode)
    with pytest.raises(ConfigError) as e:
        read_key_file(path, needs_secret=True)
    assert says in str(e.value)
    assert ANNE.secret.decode() not in str(e.value)


def test_a_key_that_is_no_valid_z85_text_is_refused(tmp_path):
    """The text has 40 characters of the alphabet, but one group of five is a number above 32 bits."""
    secret = "a" * 35 + "#####"
    assert not is_public_key(secret)
    path = _write(tmp_path / "k", key_file_text(CurveKey(ANNE.public, secret.encode())))
    with pytest.raises(ConfigError, match="secret_key must be"):
        read_key_file(str(path), needs_secret=True)


def test_every_generated_key_is_valid():
    for _ in range(50):
        key = new_key()
        assert is_public_key(key.public.decode())
        assert is_public_key(key.secret.decode())


def test_a_key_file_that_is_a_symlink_or_missing_is_refused(tmp_path):
    """A directory is refused as well."""
    path = _write(tmp_path / "k", key_file_text(ANNE))
    os.symlink(path, tmp_path / "link")
    for wrong in (tmp_path / "link", tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError):
            read_key_file(str(wrong), needs_secret=True)


def test_a_public_key_can_be_the_value_of_an_option(monkeypatch):
    """It does not begin with "-"."""
    pairs = iter([(b"-" * 40, b"secret"), (b"-W" * 20, b"secret"), (b"a-" * 20, b"secret")])
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(pairs))
    assert new_key().public == b"a-" * 20
