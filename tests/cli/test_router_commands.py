"""`ringlog router` against a real engine."""

from __future__ import annotations

import pytest

import ringlog
from ringlog.cli.outcome import CliExit
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture
from tests.support.shell import Shell

pytestmark = pytest.mark.slow

running = engine_fixture("module", delivery={"schedulers": 1})


def test_a_router_is_created_shown_listed_and_deleted(running: TestEngine) -> None:
    shell = Shell(running.url)
    made = shell.ok("router", "create", "s->d", "s", "d", "--filter", "hot*", "--drop-node")
    assert [(row["created"], row["filter"], row["preserve_node"]) for row in made] == [
        (True, ["tag", "Glob", "hot*"], False)
    ]
    shell.fails(CliExit.FAILED, "router", "create", "x->d", "x", "d")
    assert "would close a cycle" in shell.fails(CliExit.FAILED, "router", "create", "d->s", "d", "s")
    with ringlog.connect(running.url, wait=20) as client:
        client.append("s", b"one", tag="hot.1")
    (shown,) = shell.ok("router", "show", "s->d", "--settle", "20")
    assert (shown["cursor"], shown["lag"], shown["forwarded_total"]) == (1, 0, 1)
    assert [row["router"] for row in shell.ok("router", "list", "--source", "s")] == ["s->d"]
    assert shell.ok("router", "list", "--dest", "s") == []

    def is_counted() -> bool:
        status = running.status()
        return (status.routers, status.router_lag) == (1, 0)

    wait_until(is_counted, 20, "the status to say so")
    (leveled,) = shell.ok("router", "create", "s->e", "s", "e", "--levels", "eu/#")
    assert leveled["filter"] == ["tag", "Levels", "eu/#"]
    assert shell.ok("router", "delete", "s->e", "--yes")[0]["deleted"]
    assert shell.ok("router", "delete", "s->d", "--yes") == [{"router": "s->d", "deleted": True}]
    assert shell.run("router", "delete", "s->d", "--yes").returncode == CliExit.NOT_FOUND
    shell.fails(CliExit.NOT_FOUND, "router", "show", "s->d")
