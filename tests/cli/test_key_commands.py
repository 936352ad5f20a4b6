"""`ringlog key`: both halves of a key, their permissions, and what is printed."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringlog.access.key_ring import key_id
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.cli import main
from ringlog.cli.outcome import CliExit
from ringlog.link.curve import new_key, read_key_file
from ringlog.link.keys_file import follow_keys

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without a configuration file, and no RINGLOG variables."""
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("RINGLOG_")]:
        monkeypatch.delenv(variable)
    return tmp_path


def new(capsys: Printed, *words: str) -> dict[str, Any]:
    """Create a key in keys.toml; return what is printed."""
    assert main(["key", "new", *words, "--file", "keys.toml"]) == CliExit.DONE
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_bearer_key_is_admitted_and_its_file_has_only_the_digest(capsys: Printed) -> None:
    """The new file has mode 0600, also with a permissive umask."""
    before = os.umask(0)
    try:
        made = new(capsys, "web", "--scope", "read", "--scope", "write", "--prefix", "orders.")
    finally:
        os.umask(before)
    assert (made["name"], made["kind"], len(made["key"])) == ("web", "bearer", 46)
    assert mode_of("keys.toml") == 0o600
    assert made["key"] not in Path("keys.toml").read_text()
    assert key_id(made["key"]) in Path("keys.toml").read_text()
    assert made["key"] not in made["use"], "the line may be kept in a shell's history"
    assert made["use"].startswith('curl -H "Authorization: Bearer $KEY" http://127.0.0.1:4000/v0/')
    found = follow_keys("keys.toml").keys.bearer.find(f"Bearer {made['key']}")
    assert found == Principal("web", frozenset({"read", "write"}), ("orders.",))


def test_a_curve_key_is_admitted_and_its_secret_can_be_used(capsys: Printed) -> None:
    made = new(capsys, "billing", "--kind", "curve")
    assert made["key"] not in Path("keys.toml").read_text()
    filed = new(capsys, "audit", "--kind", "curve", "--out", "a b.key")
    assert "key" not in filed
    assert mode_of("a b.key") == 0o600
    assert "RINGLOG_KEY_FILE='a b.key'" in filed["use"]
    secret = read_key_file("a b.key", needs_secret=True)
    ring = follow_keys("keys.toml").keys.curve
    assert ring.find(key_id(secret.public.decode())) == Principal("audit", SCOPES)
    assert len(ring) == 2


def test_a_bearer_key_can_be_written_into_a_file(capsys: Printed) -> None:
    made = new(capsys, "web", "--out", "web.key")
    assert mode_of("web.key") == 0o600
    key = Path("web.key").read_text().strip()
    assert key not in json.dumps(made)
    assert "$(cat web.key)" in made["use"]
    assert follow_keys("keys.toml").keys.bearer.find(f"Bearer {key}") is not None


def test_the_public_key_of_a_client_is_listed_without_a_secret(capsys: Printed) -> None:
    """The pair is created where it is used. `key pair` prints the public key."""
    assert main(["key", "pair", "client.key"]) == CliExit.DONE
    pair = json.loads(capsys.readouterr().out)
    assert mode_of("client.key") == 0o600
    assert read_key_file("client.key", needs_secret=True).public.decode() == pair["public_key"]
    made = new(capsys, "remote", "--public-key", pair["public_key"])
    assert made["kind"] == "curve"
    assert "key" not in made
    assert follow_keys("keys.toml").keys.curve.find(key_id(pair["public_key"])) == Principal("remote", SCOPES)


def test_the_keys_file_and_the_addresses_come_from_the_configuration(place: Path, capsys: Printed) -> None:
    """Without the warning that the engine does not read the file."""
    assert main(["key", "pair", "server.key"]) == CliExit.DONE
    capsys.readouterr()
    (place / "ringlog.toml").write_text(
        '[native]\nendpoint = "tcp://10.0.0.1:24100"\ncurve_key_file = "server.key"\n'
        '[auth]\nkeys_file = "keys.toml"\n'
    )
    assert main(["key", "new", "billing", "--kind", "curve"]) == CliExit.DONE
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "ringlog://10.0.0.1:24100?server_key=" in json.loads(printed.out)["use"]
    assert "SERVER_KEY" not in printed.out
    assert main(["key", "list"]) == CliExit.DONE
    assert json.loads(capsys.readouterr().out)["name"] == "billing"


def test_a_list_has_names_and_rights_and_no_secret(capsys: Printed) -> None:
    made = new(capsys, "web", "--scope", "read", "--prefix", "a.")
    new(capsys, "billing", "--kind", "curve")
    assert main(["key", "list", "--file", "keys.toml"]) == CliExit.DONE
    printed = capsys.readouterr().out
    assert [json.loads(line) for line in printed.splitlines()] == [
        {"name": "web", "kind": "bearer", "scopes": ["read"], "prefixes": ["a."]},
        {"name": "billing", "kind": "curve", "scopes": sorted(SCOPES), "prefixes": []},
    ]
    assert made["key"] not in printed
    assert key_id(made["key"]) not in printed


def test_a_revoked_key_is_no_longer_admitted(capsys: Printed) -> None:
    kept, gone = new(capsys, "kept"), new(capsys, "gone")
    assert main(["key", "revoke", "gone", "--file", "keys.toml", "--yes"]) == CliExit.DONE
    assert json.loads(capsys.readouterr().out)["revoked"] == 1
    ring = follow_keys("keys.toml").keys.bearer
    assert ring.find(f"Bearer {gone['key']}") is None
    assert ring.find(f"Bearer {kept['key']}") is not None
    assert main(["key", "revoke", "gone", "--file", "keys.toml", "--yes"]) == CliExit.NOT_FOUND


class Terminal(io.StringIO):
    """Standard input or error of a process on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "is_revoked"), [("y\n", True), ("n\n", False), ("", False)])
def test_a_revocation_asks_on_a_terminal(
    answer: str, is_revoked: bool, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    new(capsys, "web")
    asked = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", asked)
    code = main(["key", "revoke", "web", "--file", "keys.toml"])
    assert code == (CliExit.DONE if is_revoked else CliExit.USAGE)
    assert "Remove 1 key named web from" in asked.getvalue()
    assert len(follow_keys("keys.toml").keys) == (0 if is_revoked else 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["new", "web"], "--file"),
        (["list"], "--file"),
        (["revoke", "web", "--yes"], "--file"),
        (["new", "", "--file", "k"], "NAME must"),
        (["new", "a b", "--file", "k"], "NAME must"),
        (["new", "web", "--scope", "root", "--file", "k"], "--scope must be one of admin"),
        (["new", "web", "--prefix", "", "--file", "k"], "--prefix must not be empty"),
        (["new", "web", "--kind", "rsa", "--file", "k"], "kind"),
        (["new", "web", "--public-key", "short", "--file", "k"], "40 characters"),
        (["new", "web", "--public-key", new_key().public.decode(), "--out", "o", "--file", "k"], "one of"),
        (["new", "web", "--file", "no/such/dir/k"], "directory"),
        (["list", "--file", "absent"], "cannot be opened"),
    ],
    ids=lambda given: None if isinstance(given, str) else " ".join(given[:2]),
)
def test_wrong_usage_changes_nothing(words: list[str], says: str, place: Path, capsys: Printed) -> None:
    assert main(["key", *words]) == CliExit.USAGE
    assert says in capsys.readouterr().err
    assert not list(place.iterdir())


def test_a_name_is_used_once(capsys: Printed) -> None:
    new(capsys, "web")
    before = Path("keys.toml").read_text()
    assert main(["key", "new", "web", "--file", "keys.toml", "--out", "web.key"]) == CliExit.USAGE
    assert "exists in" in capsys.readouterr().err
    assert Path("keys.toml").read_text() == before
    assert not Path("web.key").exists()


def test_an_existing_file_for_the_secret_is_kept(capsys: Printed) -> None:
    """The key is not added, either."""
    Path("web.key").write_text("precious")
    assert main(["key", "new", "web", "--file", "keys.toml", "--out", "web.key"]) == CliExit.FAILED
    assert main(["key", "pair", "web.key"]) == CliExit.FAILED
    assert "web.key" in capsys.readouterr().err
    assert Path("web.key").read_text() == "precious"
    assert not Path("keys.toml").exists()


@pytest.mark.parametrize("words", [["new", "web"], ["list"], ["revoke", "web", "--yes"]])
@pytest.mark.parametrize("how", ["readable", "link", "broken"])
def test_a_keys_file_that_the_engine_would_refuse_is_not_changed(
    how: str, words: list[str], place: Path, capsys: Printed
) -> None:
    path = place / "keys.toml"
    if how == "link":
        (place / "elsewhere.toml").write_text("")
        path.symlink_to("elsewhere.toml")
    else:
        path.write_text("not toml [" if how == "broken" else "")
        path.chmod(0o644 if how == "readable" else 0o600)
    before = path.read_text()
    assert main(["key", *words, "--file", "keys.toml"]) == CliExit.USAGE
    assert capsys.readouterr().err.startswith("error: config: key")
    assert path.read_text() == before


@pytest.mark.slow
def test_keys_that_are_created_at_the_same_time_are_all_listed(place: Path) -> None:
    code = "import sys; from ringlog.cli import main; sys.exit(main(sys.argv[1:]))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, "key", "new", f"k{n}", "--file", "keys.toml"], cwd=place,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for n in range(4)
    ]  # fmt: skip
    assert [each.wait(60) for each in running] == [0] * 4
    assert len(follow_keys(str(place / "keys.toml")).keys) == 4
