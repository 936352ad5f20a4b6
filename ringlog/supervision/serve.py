"""`ringlog serve` and `python -m supervisor`: run an engine in this process, from its settings."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import zmq

from ringlog import hardening, logs
from ringlog.clock import SystemClock
from ringlog.config import Config
from ringlog.config_sources import LoadedConfig, load_config, parse_flags
from ringlog.descriptors import open_standard_descriptors
from ringlog.envelope.engine_file import EngineInfo
from ringlog.errors import ConfigError, RinglogError, StartRefused
from ringlog.limits import DESCRIPTORS_MIN
from ringlog.logs import log_event
from ringlog.supervision.child_process import child_environment
from ringlog.supervision.endpoints import check_api_keys, check_listeners, keep_http_port
from ringlog.supervision.engine import run_engine
from ringlog.supervision.forkserver import ForkServer
from ringlog.supervision.tree import build_tree

log: logging.Logger = logging.getLogger("ringlog.supervision")

EXIT_REFUSED = 1
EXIT_USAGE = 2
ZMQ_VERSION_MIN = (4, 3, 5)
"""Older versions have bugs that a remote peer can exploit."""


def serve(
    *,
    config_file: str | None = None,
    sets: Sequence[str] = (),
    data_dir: str | None = None,
    check: bool = False,
    show: bool = False,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run the engine in the foreground until a stop is requested; return the exit status.

    Args:
        config_file: TOML file. None: `RINGLOG_CONFIG`, or one of the usual places.
        sets: `section.key=value` settings. They win over environment and file.
        data_dir: The same as the setting `data.dir`.
        check: Only validate the settings.
        show: Only print the process tree.
        environ: Environment variables. None: those of this process.

    Returns:
        0 after an orderly stop, 1 if the start was refused or the stop was degraded, 2 for wrong settings.
        The reason goes to standard error.
    """
    open_standard_descriptors()
    try:
        loaded = load_settings(config_file=config_file, sets=sets, data_dir=data_dir, environ=environ)
        config = check_listeners(loaded.config, environ)
        check_api_keys(os.environ if environ is None else environ)
        if check or show:
            _print(str(build_tree(config)) if show else "settings are valid")
            return 0
        os.umask(hardening.UMASK)  # Before any file is created. A check of settings creates none.
        _prepare_process(config)
        environ = os.environ if environ is None else environ
        fork_server = ForkServer(
            build_tree(config).kinds, environ=child_environment(environ), clock=SystemClock()
        )
        fork_server.fork_forkserver()
        try:
            with keep_http_port(config) as config:
                _open_log(loaded)
                return run_engine(
                    config, fork_server, environ=environ, on_ready=lambda info: _print_banner(info, loaded)
                )
        finally:
            fork_server.stop()
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
    """Return the settings as `serve` reads them; raises ConfigError."""
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
        least = ".".join(map(str, ZMQ_VERSION_MIN))
        raise StartRefused(
            f"libzmq is too old: install version {least} or later", found=zmq.zmq_version(), min=least
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
    """Print addresses, data directory and three commands to try."""
    url = f"ringlog://{loaded.config.run.dir}"
    tcp = (
        f"\n            {info.gateway_tcp} (CURVE, public key {info.public_key})" if info.gateway_tcp else ""
    )
    http = f"\n            {info.http_url}/v0/" if info.http_url else ""
    _print(
        f"ringlog {info.version} is ready\n"
        f"  listens   {url}{tcp}{http}\n"
        f"  data      {info.data_dir} ({info.shards} shards)\n"
        f"  try       export RINGLOG_URL={shlex.quote(url)}\n"
        f"            echo hello | ringlog write greetings --lines\n"
        f"            ringlog tail greetings --from start"
    )


def _print(text: str) -> None:
    # The parent may have closed its end of the pipe. The engine must continue to serve.
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as e:
        log_event(log, logging.WARNING, "standard output is closed", reason=e.strerror)


def _print_error(error: RinglogError) -> None:
    sys.stderr.write(f"ringlog: {error}\n")
    sys.stderr.flush()
