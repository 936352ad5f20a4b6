"""An object store in a child process, for tests that run an engine on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SERVER = """
import sys, logging, urllib.request
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/cold", method="PUT"), timeout=10).close()
print(f"http://{host}:{port}", flush=True)
sys.stdin.read()
"""


class bucket:  # noqa: N801  used like a function
    """An object store in its own process. Entering returns the environment variables with which an engine
    uses it."""

    def __enter__(self):
        pytest.importorskip("moto.server")
        pytest.importorskip("obstore")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        lines = iter(self._process.stdout.readline, "")
        endpoint = next(line.strip() for line in lines if line.startswith("http"))
        return {
            "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        }  # fmt: skip

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
