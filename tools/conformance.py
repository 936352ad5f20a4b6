"""Run another implementation's own tests of the HTTP contract against this gateway.

    make conformance TOPICS=path/to/checkout
    python tools/conformance.py path/to/checkout [--only probe|tests] [--filter TEXT]

The checkout of slopus/topics has a program that checks a server by its URL, and tests that start a server
each. Both are built with cargo, in build/conformance. In the copy of the tests the function that starts a
server is replaced by one that starts an engine of this checkout. Tests that need the other server inside
their own process (its clock, its fault points) cannot be reached that way, and are left out.

Prints each failed check, and how many passed. Returns 1 if a check failed that is not in EXPECTED.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from ringlog.limits import REQUEST_BYTES_MAX
from ringlog.testing.real_engine import TestEngine, engine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "conformance"
KEY = "conformance-key-of-32-characters"
PROGRAM = "topics-probe"
HARNESS = "tests/common/mod.rs"
HTTP_TESTS = (
    "harness_smoke", "integration_auth_scopes", "integration_delete", "integration_diff",
    "integration_errors", "integration_h2c", "integration_limits", "integration_queue",
    "integration_routers", "integration_sse",
    "integration_topics", "integration_watch_auth", "integration_ws",
)  # fmt: skip
EXPECTED = {
    "max_total_bytes_quota_refuses_oversize_write": "no bound on the bytes of all topics together",
    "unknown_wid_is_404": "401 without a key: a client without a key does not learn which watches exist",
}
"""Name of a check -> why this gateway answers differently on purpose (docs/how-to/http.md)."""

_ENTRY = re.compile(r"fn boot\((?:[^{}]*)\) -> Harness \{\n")
_BOOT = """        if let Ok(python) = std::env::var("CONFORMANCE_PYTHON") {
            use std::io::BufRead;
            use std::process::{Command, Stdio};
            assert!(test_clock.is_none(), "UNREACHABLE: the clock of the server is replaced");
            let own = tempfile::tempdir().unwrap();
            let mut child = Command::new(python)
                .arg(std::env::var("CONFORMANCE_TOOL").unwrap())
                .arg("--serve")
                .arg(external_dir.as_deref().unwrap_or(own.path()))
                .env("CONFORMANCE_CONFIG", format!("{config:?}"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut url = String::new();
            std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
            assert!(url.starts_with("http"), "the engine did not start");
            let (sender, receiver) = tokio::sync::oneshot::channel();
            let ender = thread::spawn(move || {
                let _ = receiver.blocking_recv();
                drop(child.stdin.take());
                let _ = child.wait();
            });
            return Harness {
                base_url: url.trim().to_string(),
                client: Client::builder().timeout(Duration::from_secs(30)).build().unwrap(),
                shutdown: Some(sender),
                thread: Some(ender),
                _data_dir: own,
                clock: None,
            };
        }
"""
_SETTINGS = {
    "probe_auth": "http", "max_body_bytes": "limits", "max_topics": "limits", "max_routers": "limits",
    "max_watch_sessions": "http", "max_sse_connections": "http", "max_sse_connections_per_key": "http",
    "max_inflight_per_key": "http",
}  # fmt: skip
"""Name of a setting of the other server -> our section, in which it has the same name."""
_SETTING = re.compile(r"\b(?P<name>\w+): (?P<value>\d+|true|false)\b")
_KEYS = re.compile(r"\bapi_keys: (\[[^\]]*\])")
_BODY_BYTES_LEAST = 4096
START_S = 90.0
"""Timeout of the start of one engine: on a busy host, the tests must not fail for that."""
_CHECK = re.compile(r"^  FAIL  (?P<name>.+)$", re.MULTILINE)
_TOTAL = re.compile(r"(\d+) passed, (\d+) failed")
_TEST = re.compile(r"^test (?P<name>\S+) \.\.\. (?P<result>\w+)", re.MULTILINE)
_PANIC = re.compile(
    r"^---- (?P<name>\S+) stdout ----\n(?P<text>.*?)(?=^---- |^failures:)", re.MULTILINE | re.DOTALL
)


def main() -> int:
    """Run the command line."""
    if sys.argv[1:2] == ["--serve"]:
        return _serve(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__.partition("\n")[0])
    parser.add_argument("topics", type=Path, help="checkout of slopus/topics")
    parser.add_argument("--only", choices=("probe", "tests"), help="run one of the two")
    parser.add_argument("--filter", default="", help="run tests whose name contains this text")
    arguments = parser.parse_args()
    if shutil.which("cargo") is None:
        _print("conformance: cargo is needed: https://rustup.rs")
        return 1
    if not (arguments.topics / "Cargo.toml").is_file():
        _print(f"conformance: {arguments.topics} is no checkout: set TOPICS=path")
        return 1
    source = _copy(arguments.topics)
    unexpected = 0
    if arguments.only != "tests":
        unexpected += _run_probe(source)
    if arguments.only != "probe":
        unexpected += _run_tests(source, arguments.filter)
    return 1 if unexpected else 0


def _serve(directory: Path) -> int:
    """Serve for one test, configured as it says: print the URL, and stop at the end of the input."""
    wanted = os.environ["CONFORMANCE_CONFIG"]
    keys = json.loads(found[1]) if (found := _KEYS.search(wanted)) else []
    settings: dict[str, Any] = {"http.enabled": True, "http.port": 0, "delivery.schedulers": 1}
    for setting in _SETTING.finditer(wanted):
        name, value = setting["name"], setting["value"]
        if name in _SETTINGS and value != "0":  # 0: without a bound. Ours keeps its default.
            settings[f"{_SETTINGS[name]}.{name}"] = value
    body_bytes = settings.pop("limits.max_body_bytes", None)
    if body_bytes is not None:
        settings["limits.max_body_bytes"] = min(max(int(body_bytes), _BODY_BYTES_LEAST), REQUEST_BYTES_MAX)
    environ = {"RINGLOG_API_KEYS": ",".join(keys)} if keys else {}
    TestEngine.ready_s = START_S
    with engine(directory=directory, environ=environ, **settings) as running:
        running.wait_ready("scheduler", timeout=START_S)
        running.wait_ready("http_gateway", timeout=START_S)
        _print(running.http_url)
        sys.stdin.read()
    return 0


def _copy(checkout: Path) -> Path:
    """Copy the checkout to build/conformance and replace what starts a server.

    Unchanged files keep their times, so that cargo builds nothing twice.
    """
    source = BUILD / "src"
    text = (checkout / HARNESS).read_text()
    entry = _ENTRY.search(text)
    if entry is None:
        raise SystemExit(f"conformance: {HARNESS} has changed: adapt _ENTRY in tools/conformance.py")
    text = text[: entry.end()] + _BOOT + text[entry.end() :]
    left_out = {".git", "target", "docs-app", "rust-toolchain.toml"}

    def ignored(directory: str, names: list[str]) -> set[str]:
        return {name for name in names if name in left_out or Path(directory, name) == checkout / HARNESS}

    shutil.copytree(checkout, source, dirs_exist_ok=True, ignore=ignored)
    harness = source / HARNESS
    if not harness.is_file() or harness.read_text() != text:
        harness.write_text(text)
    return source


def _cargo(source: Path, *arguments: str, output: IO[str] | None = None) -> int:
    """Run cargo and return its exit status. Its standard output goes to `output`."""
    environ = os.environ | {
        "CARGO_TARGET_DIR": str(BUILD / "target"),
        "CARGO_PROFILE_DEV_DEBUG": "0",
        "CARGO_PROFILE_TEST_DEBUG": "0",
        "CONFORMANCE_PYTHON": sys.executable,
        "CONFORMANCE_TOOL": str(Path(__file__).resolve()),
        "PYTHONPATH": str(ROOT),
    }
    command = ["cargo", arguments[0], "--locked", "--ignore-rust-version", *arguments[1:]]
    return subprocess.run(command, cwd=source, env=environ, stdout=output, check=False).returncode


def _run_probe(source: Path) -> int:
    if _cargo(source, "build", "-p", PROGRAM):
        raise SystemExit("conformance: cargo build failed")
    program = BUILD / "target" / "debug" / PROGRAM
    unexpected = 0
    for key in ("", KEY):
        environ = {"RINGLOG_API_KEYS": key} if key else {}
        with engine(
            environ=environ, http={"enabled": True, "port": 0}, delivery={"schedulers": 1}
        ) as running:
            running.wait_ready("http_gateway")
            command = [str(program), "conformance", running.http_url, *(["--token", key] if key else [])]
            output = subprocess.run(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False
            ).stdout
        failed = [found["name"].strip() for found in _CHECK.finditer(output)]
        total = _TOTAL.search(output)
        label = "with a key" if key else "without a key"
        if total is None:
            _print(output)
            raise SystemExit(f"conformance: no result {label}")
        unexpected += _report(f"probe, {label}", int(total[1]), failed, dict.fromkeys(failed, ""))
    return unexpected


def _run_tests(source: Path, wanted: str) -> int:
    chosen = [part for name in HTTP_TESTS for part in ("--test", name)]
    report = BUILD / "tests.txt"
    with report.open("w") as output:
        _cargo(source, "test", *chosen, "--no-fail-fast", "--", "--test-threads=2", wanted, output=output)
    text = report.read_text()
    results = {found["name"]: found["result"] for found in _TEST.finditer(text)}
    texts = {found["name"]: found["text"].strip() for found in _PANIC.finditer(text)}
    left_out = [name for name, why in texts.items() if "UNREACHABLE" in why]
    failed = [name for name, result in results.items() if result == "FAILED" and name not in left_out]
    passed = sum(result == "ok" for result in results.values())
    if not results:
        raise SystemExit("conformance: the tests did not build")
    _print(f"tests: {len(left_out)} left out, which need the server in their process")
    return _report("tests", passed, failed, texts)


def _report(label: str, passed: int, failed: list[str], texts: dict[str, str]) -> int:
    """Print the result; return the number of failures that are not expected."""
    for name in failed:
        why = EXPECTED.get(name)
        _print(f"  {'differs on purpose' if why else 'FAILED'}: {name}{f' ({why})' if why else ''}")
        if not why and texts.get(name):
            _print("    " + texts[name].replace("\n", "\n    "))
    _print(f"{label}: {passed} of {passed + len(failed)} pass")
    return sum(name not in EXPECTED for name in failed)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
