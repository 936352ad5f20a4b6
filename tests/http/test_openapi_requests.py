"""schemathesis against a real gateway: requests made from the OpenAPI document, valid ones and invalid ones.

It checks that no request ends in a server error, that each reply has a status and a content type of the
document, that requests outside of the document are refused, and that an engine with keys requires one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringlog.testing

pytestmark = pytest.mark.slow

KEY = "owner-" + "a" * 40
TIMEOUT_S = 240
STREAMS = "/watch/|/work$|/ws$"
"""Replies to these do not end."""
EXAMPLES = 5
CASES_MIN = 500


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("key", ["", KEY], ids=["without a key", "with a key"])
def test_requests_of_the_document_get_replies_of_the_document(key: str, tmp_path: Path) -> None:
    environ = {"RINGLOG_API_KEYS": key} if key else {}
    http = {"enabled": True, "port": 0}
    with ringlog.testing.engine(http=http, delivery={"schedulers": 1}, environ=environ) as running:
        running.wait_ready("http_gateway")
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{running.http_url}/v0/openapi.json",
            "--url", running.http_url, "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES),
            "--exclude-path-regex", STREAMS, "--generation-deterministic", "--seed", "1", "--no-color",
            "--warnings", "off",
            # The document does not state every limit of a value.
            "--exclude-checks", "positive_data_acceptance",
        ]  # fmt: skip
        if key:
            command += ["--header", f"Authorization: Bearer {key}"]
        found = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONWARNINGS": "ignore"}, timeout=TIMEOUT_S,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout[-8_000:] + found.stderr[-2_000:]
        assert int(found.stdout.split(" generated")[0].rsplit(None, 1)[-1]) > CASES_MIN
