"""The command line without an engine: parsing, exit codes, one-line errors, configuration, doctor."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import ringlog
from ringlog import errors as e
from ringlog.cli import main
from ringlog.cli.doctor import (
    BAD,
    OK,
    WARN,
    check_compilation,
    check_kernel,
    check_open_files,
    check_packages,
    check_python,
    check_shared_memory,
    check_space,
    check_sync,
)
from ringlog.cli.outcome import CliExit, cli_exit_code, error_line
from ringlog.cli.probe import existing_parent, quantile, time_syncs
from ringlog.cli.status import human_seconds
from ringlog.cli.topic import ConfigFlags
from ringlog.cli.write import chunks, json_records, refused_line, split_lines
from ringlog.clock import SystemClock
from ringlog.config import Config, DataConfig
from ringlog.limits import RECORD_BYTES_MAX

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without an engine or a configuration file, and no RINGLOG variables."""
    monkeypatch.chdir(tmp_path)
    for variable in ("RINGLOG_URL", "RINGLOG_CONFIG", "RINGLOG_WAL_SHARDS", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (e.UsageError("x"), 2),
        (e.ConfigError("x"), 2),
        (e.NotConnected("x"), 3),
        (e.AuthFailed("x"), 3),
        (e.TopicNotFound("x"), 4),
        (e.RequestTimeout("x", outcome="unknown"), 5),
        (e.NotReady("x", outcome="unknown"), 5),
        (e.NotReady("x"), 1),
        (e.Forbidden("x"), 1),
        (e.StartRefused("x"), 1),
        (e.CorruptData("x"), 6),
        (OSError(errno.ENOENT, "No such file", "f"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(error: BaseException, code: int) -> None:
    assert cli_exit_code(error) == code


def test_an_error_is_one_line_with_its_code_and_facts() -> None:
    line = error_line(e.TopicFull("topic is full\nreally", topic="t", cap_records=5))
    assert line == "error: topic_full: topic is full really (topic='t', cap_records=5)"
    assert error_line(OSError(errno.ENOENT, "No such file", "f")) == "error: os: f: No such file"
    assert error_line(ZeroDivisionError("by zero")) == "error: internal: ZeroDivisionError: by zero"
    assert error_line(e.RequestTimeout("late", outcome="unknown")).endswith("not known")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["version", "--nonsense"],
        ["--timeout", "soon", "version"],
        ["--output", "xml", "version"],
        ["topic", "show"],
        ["write", "t", "--lines", "--whole"],
        ["write", "t", "--key-field", "k"],
        ["write", "t", "--durability", "eternal"],
        ["read", "t", "--from", "banana"],
        ["read", "t", "--limit", "0"],
        ["tail"],
        ["topic", "set", "t"],
        ["topic", "create", "t", "--cap-bytes", "many"],
        ["bench", "append", "--producers", "0"],
        ["bench", "append", "--durability", "eternal"],
        ["chaos", "--rate", "0"],
        ["inspect", "wal-1-1.log", "--limit", "-1"],
        ["ack", "q", "18446744073709551616"],
        ["put", "q", "job", "--ttl", "36501d"],
        ["read", "t", "--from", "9223372036854775808"],
        ["worker", "m:f", "--queue", "q", "--log-format", "xml"],
        ["status", "--url", "ringlog://host:1"],
        ["status", "--url", "http://host"],
        ["config", "show", "--set", "wal.shards"],
        ["serve", "--set", "wal.shard=2", "--check"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == CliExit.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1, printed.err


@pytest.mark.parametrize(
    "command", [["status"], ["topic", "list"], ["read", "t"], ["write", "t"], ["tail", "t"]]
)
def test_a_command_without_an_engine_fails_at_once(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == CliExit.NO_CONNECTION
    assert capsys.readouterr().err.startswith("error: connection: no engine is running")


@pytest.mark.parametrize(
    "command",
    [
        "delete t --before-seq 3",
        "topic delete t",
        "router delete r",
        "queue purge q",
        "dead-letter purge q",
        "group seek t g 5",
        "group reset t g",
        "group delete t g",
        "key revoke k",
        "repair . --to new --write",
        "spark compact . --apply",
    ],
)
def test_without_a_terminal_a_destructive_command_needs_yes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == CliExit.USAGE
    assert "needs --yes" in capsys.readouterr().err
    if not command.startswith("spark"):  # The command would start a JVM.
        assert main([*command.split(), "--yes"]) != CliExit.DONE
        assert "needs --yes" not in capsys.readouterr().err


@pytest.mark.parametrize("at", [0, 1, 2])
def test_global_options_may_stand_anywhere(at: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "check"]
    assert main([*words[:at], "--output", "json", *words[at:]]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == "ok"


@pytest.mark.parametrize("group", [[], ["topic"], ["bench"], ["config"], ["write"], ["tail"]])
def test_help_names_every_command(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*group, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_output_for_a_pipe_is_ndjson(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"ringlog", "protocol", "python"}


def test_the_configuration_names_the_source_of_each_value(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone / "ringlog.toml").write_text("[run]\nring_bytes = '4MiB'\n")
    monkeypatch.setenv("RINGLOG_WAL_SHARDS", "3")
    assert main(["config", "show", "--set", "wal.file_bytes=16MiB"]) == 0
    rows = {row["key"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["run.ring_bytes"]["value"] == 4 << 20
    assert rows["run.ring_bytes"]["source"].startswith("file ")
    assert rows["wal.shards"]["source"] == "environment RINGLOG_WAL_SHARDS"
    assert rows["wal.file_bytes"]["source"] == "flag"
    assert rows["log.level"]["source"] == "default"


def test_an_invalid_variable_is_a_warning_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`config check` exits with an error."""
    monkeypatch.setenv("RINGLOG_WAL_SHARDS", "many")
    assert main(["config", "check"]) == CliExit.USAGE
    assert capsys.readouterr().err.startswith("warning: RINGLOG_WAL_SHARDS")
    assert main(["config", "check", "--quiet"]) == CliExit.USAGE
    assert capsys.readouterr().err == ""


def test_a_missing_cold_directory_fails_the_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "check", "--set", f"cold.dir={tmp_path}"]) == 0
    assert main(["config", "check", "--set", f"cold.dir={tmp_path}/not-mounted"]) == CliExit.USAGE
    assert "there is no directory" in capsys.readouterr().err


def test_config_check_and_serve_refuse_bearer_keys_and_never_quote_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGLOG_API_KEYS", "hunter2-hunter2-hunter2:root")
    for words in (["config", "check"], ["serve", "--check"]):
        assert main(words) == CliExit.USAGE
        printed = capsys.readouterr()
        assert "RINGLOG_API_KEYS" in printed.err
        assert "hunter2" not in printed.out + printed.err
    monkeypatch.setenv("RINGLOG_API_KEYS", "hunter2-hunter2-hunter2:read")
    assert main(["config", "check"]) == CliExit.DONE
    assert main(["config", "env"]) == CliExit.DONE
    assert "hunter2" not in capsys.readouterr().out


def test_config_check_refuses_a_listener_that_serve_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--set", "native.endpoint=tcp://0.0.0.0:4100"]) == CliExit.USAGE
    assert "curve_key_file" in capsys.readouterr().err


def test_topic_flags_become_topic_settings() -> None:
    flags = ConfigFlags(
        durability="fsync", ttl="7d", cap_bytes="64MiB", sets=("priority=5", "type=log", "dead_letter=null")
    )
    assert flags.values() == {
        "durability": "fsync", "ttl_ms": 604_800_000, "cap_bytes": 64 << 20, "priority": 5, "type": "log",
        "dead_letter": None,
    }  # fmt: skip
    assert ConfigFlags().values() == {}


# -- input of write -------------------------------------------------------------------------------------


def test_split_lines_drops_line_breaks_and_empty_lines() -> None:
    file = io.BytesIO(b"a\n\r\nb\r\n\nlast")
    assert list(split_lines(file, "f")) == [(1, b"a"), (3, b"b"), (5, b"last")]


def test_a_line_may_be_as_long_as_a_record_and_not_longer() -> None:
    """The limit is RECORD_BYTES_MAX without the line break."""
    fits = b"x" * RECORD_BYTES_MAX
    assert list(split_lines(io.BytesIO(fits + b"\r\n" + fits + b"\n"), "f")) == [(1, fits), (2, fits)]
    for ending in (b"", b"\n", b"yy\n"):
        with pytest.raises(e.RecordTooLarge, match="line"):
            list(split_lines(io.BytesIO(fits + b"y" + ending), "f"))


def test_an_error_names_the_line_that_the_engine_refused() -> None:
    large = [("f", 3, 2_000_000), ("f", 9, 3_000_000)]
    refused = e.RecordTooLarge("record too large", bytes=3_000_000, max=2_500_000)
    assert refused_line(refused, large).detail == {"file": "f", "line": 9, "max": 2_500_000}
    refused.detail["acknowledged"] = 1_000
    assert refused_line(refused, large).detail["acknowledged"] == 1_000
    many = e.RecordTooLarge("records in one write must be <= cap_records", records=5, max=2, exceeds_cap=1)
    assert refused_line(many, large) is many


def test_an_error_names_the_line_that_is_not_json() -> None:
    with pytest.raises(e.UsageError, match="line=7"):
        list(json_records([(7, b"{")], "f", None))


def test_keys_are_taken_from_a_field() -> None:
    records = list(json_records([(1, b'{"k":"a"}'), (2, b'{"k":5}')], "f", "k"))
    assert [record.key for record in records] == [b"a", b"5"]
    for line in (b'{"k":null}', b"[]", b"{}"):
        with pytest.raises(e.UsageError, match="no field 'k'"):
            list(json_records([(1, line)], "f", "k"))


def test_chunks_are_bounded_in_records_and_bytes() -> None:
    assert [len(chunk) for chunk in chunks([b"x"] * 2500)] == [1000, 1000, 500]
    assert [len(chunk) for chunk in chunks([bytes(700_000)] * 3)] == [2, 1]
    assert list(chunks([])) == []


# -- doctor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "verdict"), [("5.2.0", BAD), ("5.3.0", OK), ("6.18.4-x", OK), ("4.19", BAD), ("odd", BAD)]
)
def test_the_kernel_must_have_pidfds(release: str, verdict: str) -> None:
    assert check_kernel("Linux", release).verdict == verdict
    assert check_kernel("Darwin", release).verdict == BAD


def test_every_bad_finding_has_advice(tmp_path: Path) -> None:
    found = [
        check_kernel("Linux", "4.0"),
        check_python((3, 10), "3.10.1"),
        check_shared_memory(Config(), str(tmp_path / "absent")),
        check_open_files((256, 4096)),
        check_space(Config(data=DataConfig(min_free_bytes=1 << 60)), str(tmp_path)),
    ]
    assert [finding.verdict for finding in found] == [BAD, BAD, BAD, WARN, BAD]
    assert all(finding.advice for finding in found)


def test_a_checkout_is_ok_and_has_advice() -> None:
    assert check_compilation(True).found == "in use"
    found = check_compilation(False)
    assert found.verdict == OK
    assert "source checkout" in found.found
    assert "wheel" in found.advice


def test_missing_packages_are_bad_unless_optional() -> None:
    def version_of(name: str) -> str:
        if name in {"pyarrow", "numpy"}:
            raise PackageNotFoundError(name)
        return "1"

    found = {finding.check: finding for finding in check_packages(version_of)}
    assert found["package numpy"].verdict == BAD
    assert found["package pyarrow"].verdict == OK
    assert found["package pyzmq"].found == "1"


def test_the_sync_probe_measures_and_leaves_no_file(tmp_path: Path) -> None:
    times = time_syncs(str(tmp_path), 5, SystemClock())
    assert len(times.sorted_s) == 5
    assert 0 < times.quantile_ms(0.5) <= times.quantile_ms(0.99)
    assert list(tmp_path.iterdir()) == []
    assert check_sync(str(tmp_path / "not" / "yet" / "made"), SystemClock()).check == "sync"


def test_quantiles_are_of_the_nearest_rank() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_existing_parent_returns_the_nearest_existing_directory(tmp_path: Path) -> None:
    assert existing_parent(str(tmp_path / "a" / "b")) == str(tmp_path)


def test_the_doctor_examines_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    checks = [json.loads(line)["check"] for line in capsys.readouterr().out.splitlines()]
    assert checks[:4] == ["kernel", "processor", "python", "shared memory"]
    assert {"sync", "clock", "messaging", "package pyzmq"} <= set(checks)


# -- other ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.25, "1.2 s"), (302, "5m 02s"), (11_220, "3h 07m"), (187_200, "2d 04h")]
)
def test_human_seconds_is_short(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.slow
def test_a_command_loads_only_the_modules_that_it_needs() -> None:
    """A command that needs neither NumPy nor ZeroMQ nor rich must not load them at its start."""
    code = (
        "import sys; from ringlog.cli import main; main(['version', '--quiet']);"
        "print([m for m in ('numpy', 'zmq', 'psutil', 'rich', 'ringlog.client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "ringlog"]
    done = subprocess.run([*command, "topik"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == CliExit.USAGE
    assert "topic" in done.stderr
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split()[-1] == ringlog.__version__


@pytest.mark.slow
def test_a_closed_output_pipe_is_no_error() -> None:
    command = (
        f'{sys.executable} -c \'import sys; from ringlog.cli import main; sys.exit(main(["config", "env"]))\''
    )
    script = f"set -o pipefail; {command} | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
