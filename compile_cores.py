"""Compile cores of engine and client with mypyc: `python compile_cores.py`, and hatch_build.py for wheels.

They are ordinary typed Python, and stay the source of truth. What is compiled lies beside them, in
ringlog/_cores, with a manifest that says of which sources it was made: ringlog/cores.py takes it only for
exactly these. So a change of a source is never hidden by what was compiled before it.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
GROUPS = {
    "ringlog_state": ("ringlog/leases/*.py", "ringlog/topic/*.py"),
    "ringlog_lines": (
        "ringlog/board/*.py", "ringlog/envelope/wire.py", "ringlog/frame/batch.py", "ringlog/frame/codec.py",
        "ringlog/frame/header.py", "ringlog/frame/settle_entry.py", "ringlog/link/channel/call_ring.py",
        "ringlog/ring/doorbell.py", "ringlog/runtime/duty_cycle.py", "ringlog/storage/vectored_write.py",
        "ringlog/storage/wal.py", "ringlog/spin_wait.py",
    ),
    "ringlog_client": (
        "actors/gateway/ring_push.py",  # Derives from link.channel.outbound_frames.OutboundFrames.
        "ringlog/link/channel/[!c]*.py", "ringlog/link/channel/call_link.py",
        *(
            f"ringlog/link/{name}.py"
            for name in (
                "engine_watch", "futures", "gateway_links", "local_links", "peer", "protocol",
                "publication", "timers",
            )
        ),
        *(
            f"ringlog/client/{name}.py"
            for name in (
                "connection/locked_connection", "connection/session", "connection/shell",
                "leases/ack_pipeline", "leases/claim_result", "leases/group_lease_operations",
                "leases/inline_jobs", "leases/lease_extender", "leases/lease_operations",
                "write/assembler", "write/batch", "write/explicit_sequence_producer",
                "write/producer_core", "write/stream",
            )
        ),
    ),
    "ringlog_shard": tuple(
        f"actors/wal_shard/{name}.py"
        for name in (
            "core", "events", "phases", "routing", "shell", "commit/*", "leases/*", "metrics/*",
            "retention/*", "requests/call_rings", "requests/read_only_mode", "requests/socket_requests",
            "recovery/log_file_table", "recovery/shard_facts", "io/log_io", "io/read_only_probe", "io/rings",
        )
    ),
}  # fmt: skip
"""Each becomes one library, compiled beside the others."""
TARGET = "ringlog/_cores"
MANIFEST = "manifest.json"
_SAID_CHARS_MAX = 4_000


def sources(root: Path = ROOT) -> dict[str, list[str]]:
    """Files of each group, relative to the root."""
    found = {
        name: sorted(str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern))
        for name, patterns in GROUPS.items()
    }
    return {name: [file for file in files if _may_be(root / file)] for name, files in found.items()}


def _may_be(file: Path) -> bool:
    """Not where shapes of stored bytes are defined: msgspec reads annotations, and compiled ones say less."""
    return file.name != "__init__.py" and "(msgspec.Struct" not in file.read_text()


def compile_cores(root: Path = ROOT) -> str:
    """Compile them, if that was not done for these sources; returns why that failed, or nothing."""
    sys.path.insert(0, str(root))
    from ringlog.cores import digest, stale_reason

    target = root / TARGET
    groups = sources(root)
    digests = {file: digest(root / file) for files in groups.values() for file in files}
    made_by = digest(Path(__file__))
    if not stale_reason(target, root) and _is_of(target, made_by, digests):
        return ""
    compiler = shlex.split(os.environ.get("CC", "cc"))[0]
    if shutil.which(compiler) is None:
        return f"no compiler ({compiler})"
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
    except ImportError as e:
        return f"{e.name} is not installed"
    before, arguments = Path.cwd(), sys.argv
    # Kept: of a group that has not changed since, nothing is compiled again.
    made = root / "build" / "cores"
    made.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said), _alone(made):
            extensions = _extensions(mypycify, groups, made / "c")
            distribution = Distribution({"name": "ringlog-cores", "ext_modules": extensions})
            command: Any = build_ext(distribution)
            command.build_lib, command.build_temp = str(made / "lib"), str(made / "o")
            command.parallel = os.cpu_count()
            command.force = not _is_made_by(target, made_by)
            command.ensure_finalized()
            command.run()
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            _put(made / "lib", target, {"suffix": suffix, "made_by": made_by, "sources": digests}, extensions)
    except (SystemExit, Exception) as e:  # noqa: BLE001  whatever hinders it, the package is whole without
        return f"{type(e).__name__}: {e}\n{said.getvalue()[-_SAID_CHARS_MAX:]}"
    finally:
        os.chdir(before)
        sys.argv = arguments
    return ""


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else compiles there meanwhile."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _extensions(mypycify: Any, groups: dict[str, list[str]], target: Path) -> list[Any]:
    files = [file for each in groups.values() for file in each]
    # Always all of it: from what it kept of an earlier time mypyc 2.4 cannot go on ("value is not in list").
    cache = target.with_name("mypy")
    shutil.rmtree(cache, ignore_errors=True)
    options = ["--ignore-missing-imports", "--no-warn-unused-ignores", f"--cache-dir={cache}"]
    return list(
        mypycify(
            [*options, *files], opt_level="1", debug_level="0", target_dir=str(target), verbose=False,
            separate=[(each, name) for name, each in groups.items()],
        )
    )  # fmt: skip


def _is_made_by(target: Path, made_by: str) -> bool:
    """Was what is there made in this way?"""
    try:
        return bool(json.loads((target / MANIFEST).read_text()).get("made_by") == made_by)
    except (OSError, ValueError):
        return False


def _is_of(target: Path, made_by: str, digests: dict[str, str]) -> bool:
    """Is it of just these files, none of which is new, and made in this way?"""
    return _is_made_by(target, made_by) and json.loads((target / MANIFEST).read_text())["sources"] == digests


def _put(library: Path, target: Path, manifest: dict[str, Any], extensions: list[Any]) -> None:
    """In place of what was there; a process that has the old ones mapped keeps them."""
    new = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    # Of modules that are compiled no more some may lie there still.
    for extension in extensions:
        file = f"{extension.name.replace('.', '/')}{manifest['suffix']}"
        (new / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library / file, new / file)
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def main(arguments: Sequence[str] = ()) -> int:
    """Say what came of it; without a compiler that is no error, unless it is asked for with `--must`."""
    failure = compile_cores()
    if failure:
        sys.stderr.write(f"the engine's cores are not compiled, and slower: {failure}\n")
    return int(bool(failure) and "--must" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
