"""`ringlog serve` and `python -m supervisor`: settings to a running engine, in this process."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import zmq

from ringlog import hardening, logs
from ringlog.clock import SystemClock
from ringlog.config import Config, LoadedConfig, load_config, parse_flags
from ringlog.descriptors import open_standard_descriptors
from ringlog.envelope.engine_file import EngineInfo
from ringlog.errors import ConfigError, RinglogError, StartRefused
from ringlog.limits import DESCRIPTORS_MIN
from ringlog.logs import log_event
from ringlog.supervision.child_process import child_environment
from ringlog.supervision.endpoints import check_listeners
from ringlog.supervision.engine import run_engine
from ringlog.supervision.forkserver import ForkServer
from ringlog.supervision.tree import build_tree

log = logging.getLogger("ringlog.supervision")

EXIT_REFUSED = 1
EXIT_USAGE = 2
ZMQ_VERSION_MIN = (4, 3, 5)
"""Older ones have bugs that a remote peer can use (SEC-8)."""


def serve(
    *,
    config_file: str | None = None,
    sets: Sequence[str] = (),
    data_dir: str | None = None,
    check: bool = False,
    show: bool = False,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run the engine in the foreground until it is told to stop; returns the exit status.

    `sets` are `section.key=value`; `check` only validates the settings, `show` only prints the process
    tree. 0 orderly, 1 refused or degraded, 2 wrong settings; the reason goes to standard error.
    """
    open_standard_descriptors()
    try:
        loaded = load_settings(config_file=config_file, sets=sets, data_dir=data_dir, environ=environ)
        config = check_listeners(loaded.config)
        if check or show:
            _print(str(build_tree(config)) if show else "settings are valid")
            return 0
        os.umask(hardening.UMASK)  # Before anything is made; a check of settings makes nothing.
        _prepare_process(config)
        environ = os.environ if environ is None else environ
        forks = ForkServer(build_tree(config).kinds, environ=child_environment(environ), clock=SystemClock())
        forks.fork_forkserver()
        try:
            _open_log(loaded)
            return run_engine(
                config, forks, environ=environ, on_ready=lambda info: _print_banner(info, loaded)
            )
        finally:
            forks.stop()
    except ConfigError as e:
        _print_error(e)
        return EXIT_USAGE
    except StartRefused as e:
        _print_error(e)
        return EXIT_REFUSED
    except RinglogError as e:
        log.critical("engine failed", exc_info=e)
        _print_error(e)
        return EXIT_REFUSED


def load_settings(
    *,
    config_file: str | None = None,
    sets: Sequence[str] = (),
    data_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The settings as `serve` sees them; raises ConfigError."""
    flags = parse_flags(sets)
    if data_dir is not None:
        flags["data.dir"] = data_dir
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted: start in one that exists") from None
    return load_config(flags, environ, cwd, config_file=config_file)


def _prepare_process(config: Config) -> None:
    if zmq.zmq_version_info() < ZMQ_VERSION_MIN:
        raise StartRefused(
            "libzmq is too old", found=zmq.zmq_version(), min=".".join(map(str, ZMQ_VERSION_MIN))
        )
    hardening.harden(may_profile=config.profile.allow)
    allowed = hardening.open_files_allowed()
    if allowed < DESCRIPTORS_MIN:
        raise StartRefused(
            "too few open files are allowed: raise the limit (`ulimit -n`, LimitNOFILE= of systemd)",
            found=allowed, min=DESCRIPTORS_MIN,
        )  # fmt: skip
    hardening.restore_sigchld()
    hardening.set_process_title("ringlog")


def _open_log(loaded: LoadedConfig) -> None:
    settings = loaded.config.log
    logs.configure(level=settings.level, format=settings.format, file=settings.file, actor="supervisor")
    for warning in loaded.warnings:
        log_event(log, logging.WARNING, "setting ignored", reason=warning)


def _print_banner(info: EngineInfo, loaded: LoadedConfig) -> None:
    """Where it listens, where the data is, and three lines to try."""
    url = f"ringlog://{loaded.config.run.dir}"
    tcp = (
        f"\n            {info.gateway_tcp} (CURVE, public key {info.public_key})" if info.gateway_tcp else ""
    )
    _print(
        f"ringlog {info.version} is ready\n"
        f"  listens   {url}{tcp}\n"
        f"  data      {info.data_dir} ({info.shards} shards)\n"
        f"  try       export RINGLOG_URL={shlex.quote(url)}\n"
        f"            echo hello | ringlog write greetings --lines\n"
        f"            ringlog tail greetings --from start"
    )


def _print(text: str) -> None:
    # Who started us may have closed its end of the pipe; that is no reason to stop serving.
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as e:
        log_event(log, logging.WARNING, "standard output is gone", reason=e.strerror)


def _print_error(error: RinglogError) -> None:
    sys.stderr.write(f"ringlog: {error}\n")
    sys.stderr.flush()
