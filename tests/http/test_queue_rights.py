"""Rights on queues and groups, and what clients of queues see at a stop. Each test stops its own engine."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

import ringlog.testing
from ringlog.access.key_ring import key_id
from tests.support.http_client import HttpClient
from tests.support.http_queues import open_request, wait_until

pytestmark = pytest.mark.slow

SECRETS = {name: f"rl_{name}_" + "x" * 40 for name in ("root", "reader", "worker")}
KEYS = f"""
[[keys]]
name = "root"
bearer_sha256 = "{key_id(SECRETS["root"])}"

[[keys]]
name = "reader"
bearer_sha256 = "{key_id(SECRETS["reader"])}"
scopes = ["read"]

[[keys]]
name = "worker"
bearer_sha256 = "{key_id(SECRETS["worker"])}"
scopes = ["read", "write", "delete"]
prefixes = ["jobs."]
"""


def test_rights_and_the_stop(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(KEYS)
    keys_file.chmod(0o600)
    with ringlog.testing.engine(
        http={"enabled": True, "port": 0}, auth={"keys_file": str(keys_file)}, delivery={"schedulers": 1}
    ) as engine:
        engine.wait_ready("http_gateway")
        root, reader, worker = (HttpClient(engine.http_url, SECRETS[name]) for name in SECRETS)
        root("PUT", "/v0/topics/jobs.a", {"type": "queue", "dead_letter": "dead", "max_deliveries": 3})
        root("PUT", "/v0/topics/other", {"type": "queue"})
        root("PUT", "/v0/topics/jobs.log", {"retain_until_acked": True, "cap_records": 10})

        # A claim needs read and write, an ack write, the lists read, a purge delete.
        assert reader("POST", "/v0/topics/jobs.a/claim", {"node": "w"}).status == 403
        assert reader("GET", "/v0/topics/jobs.a/work?node=w").status == 403
        assert reader("POST", "/v0/topics/jobs.a/ack", {"node": "w", "seqs": [1]}).status == 403
        assert reader("GET", "/v0/topics/jobs.a/pending").status == 200
        assert reader("POST", "/v0/topics/jobs.a/purge").status == 403
        assert worker("POST", "/v0/topics/jobs.a/claim", {"node": "w"}).status == 200
        assert worker("POST", "/v0/topics/other/claim", {"node": "w"}).status == 403
        assert worker("POST", "/v0/topics/absent/claim", {"node": "w"}).status == 403
        # The letters are deleted from a topic that the key does not cover.
        assert worker("POST", "/v0/topics/jobs.a/redrive").status == 403
        assert (
            worker("PUT", "/v0/topics/jobs.log/groups/g", {"mode": "queue", "dead_letter": "dead"}).status
            == 403
        )

        # A group in mode queue holds records of this topic back: only admin may create or move one.
        path = "/v0/topics/jobs.log/groups/g"
        refused = worker("PUT", path, {"mode": "queue"})
        assert (refused.status, refused.body["error"]["detail"]["required_scope"]) == (403, "admin")
        assert worker("PUT", "/v0/topics/jobs.log/groups/s", {"mode": "stream"}).status == 201
        assert root("PUT", path, {"mode": "queue"}).status == 201
        assert worker("PUT", path, {"mode": "queue"}).status == 200
        assert worker("POST", f"{path}/claim", {"node": "w"}).status == 200
        assert worker("POST", f"{path}/seek", {"start": "latest"}).status == 403
        assert worker("POST", "/v0/topics/jobs.log/groups/s/seek", {"start": "latest"}).status == 200

        # At a stop a work stream gets a final frame, and a waiting claim an answer.
        root("POST", "/v0/topics/jobs.a", {"records": [{"data": 1}]})
        body = {"node": "w", "wait_ms": 30_000}
        with (
            root.stream("/v0/topics/jobs.a/work?node=s") as stream,
            open_request(root, "POST", "/v0/topics/other/claim", body) as waiting,
        ):
            job = stream.frame()
            assert job is not None
            assert job.event == "job"
            wait_until(lambda: root("GET", "/v0/topics/other/stats").body["waiting"] == 1, "the claim waits")
            engine.stop()
            last = stream.frame()
            assert last is not None
            assert (last.event, last.data["code"], last.data["error"]) == ("error", 503, "shutting_down")
            assert stream.frame() is None
            reply = http.client.HTTPResponse(waiting)
            reply.begin()
            assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, "shutting_down")
            assert reply.getheader("retry-after") == "1"
        for client in (root, reader, worker):
            client.close()
