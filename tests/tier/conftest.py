"""S3 buckets for the tests, served in this process."""

from __future__ import annotations

import logging
import urllib.request

import pytest


@pytest.fixture(scope="session")
def s3():
    """The address and credentials of an object store, as options of obstore."""
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    for bucket in ("cold", "other"):
        request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
    yield {
        "endpoint": endpoint,
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    server.stop()
