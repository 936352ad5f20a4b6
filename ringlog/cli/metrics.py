"""`ringlog metrics`: the content of `ringlog status` in the Prometheus text format, printed once or served.

Names use the prefix `ringlog_` and base units. Counters come from the board: they survive the replacement of
a process and restart with the engine. Labels (processes, bands) are bounded by the configuration. There are
no series per topic; use `ringlog queue stats` and `ringlog group list` for these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ringlog.cli.option_parsing import parse_seq
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.status import run_dir_of
from ringlog.envelope.messages import EngineStatusReply
from ringlog.envelope.status_metrics import families, gauge
from ringlog.errors import RinglogError, UsageError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PORT_MAX = 65_535
POLL_INTERVAL_S = 1.0
"""Interval at which a server checks whether it was stopped."""


def metrics(
    *,
    listen: Annotated[str, Parameter(negative=())] = "",
    options: Annotated[Options, Parameter(parse=False)],
) -> int:
    """Print or serve the engine's metrics in the Prometheus text format.

    Works on the engine's own host. Needs `pip install 'ringlog[metrics]'`.

    Parameters
    ----------
    listen
        Serve the metrics at http://HOST:PORT/metrics until interrupted. Every client that reaches this
        address can read them: use an address of this host (127.0.0.1).

    Examples
    --------
    ringlog metrics
    ringlog metrics --listen 127.0.0.1:9464
    """
    place = address_of(listen) if listen else None
    exposition = _library()
    sampled = StatusCollector(lambda: _status(options))
    if place is None:
        found = _status(options)  # Printed once: an engine that does not run is an error.
        options.printer().text(exposition.generate_latest(StatusCollector(lambda: found)).decode())
        return CliExit.DONE
    host, port = place
    try:
        server, thread = exposition.start_http_server(port, host, registry=sampled)
    except OSError as e:
        raise UsageError("cannot listen on the address of --listen", address=listen, why=e.strerror) from None
    with closing(_MetricsServer(server, thread)):
        printer = options.printer()
        printer.item({"metrics": f"http://{host}:{server.server_port}/metrics"})
        printer.flush()
        while thread.is_alive():
            options.clock.sleep(POLL_INTERVAL_S)
    return CliExit.DONE


class _MetricsServer:
    """Adapter that closes a running metrics server."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread

    def close(self) -> None:
        """Stop the server, even if a request is active."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(POLL_INTERVAL_S)


def _library() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise UsageError("metrics need a library: pip install 'ringlog[metrics]'") from None
    return prometheus_client


def _status(options: Options) -> EngineStatusReply:
    from ringlog.supervision import control_client

    return control_client.fetch_status(run_dir_of(options), options.timeout_s)


def address_of(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, or :PORT for 127.0.0.1; raise UsageError."""
    host, _, port = text.rpartition(":")
    number = parse_seq(port)
    if number is None or number > PORT_MAX:
        raise UsageError(f"--listen must be HOST:PORT with a port up to {PORT_MAX}, got {text!r}")
    return host.strip("[]") or "127.0.0.1", number


class StatusCollector:
    """Fetches the status at each collection, one at a time.

    Every collection returns metrics: if the engine does not reply, `ringlog_up` is 0."""

    def __init__(self, ask: Callable[[], EngineStatusReply]) -> None:
        self._ask = ask
        self._asking = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        with self._asking:
            try:
                found = list(families(self._ask()))
            except RinglogError:
                found = [gauge("up", "1: the engine answers.", 0)]
        for kind, name, text, labels, rows in found:
            family = kinds[kind](f"ringlog_{name}", text, labels=labels)
            for values, number in rows:
                family.add_metric(list(values), number)
            yield family
