"""The gateway in a real engine: ipc and encrypted TCP, killed processes, slow waiters. Slow."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

import ringlog
import ringlog.aio
from ringlog.environment import STOP_POINTS
from ringlog.errors import AuthFailed, Forbidden, TopicNotFound
from ringlog.limits import ORPHAN_DRAIN_S
from ringlog.link.curve import key_file_text, new_key
from ringlog.placement import home_shard
from ringlog.testing.real_engine import engine, wait_until
from tests.support.machine import free_port, private_file, suspended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SERVER, ANNE, BERT, EVE = new_key(), new_key(), new_key(), new_key()


def state_of(pid):
    """Return the state letter of a process: T stopped, Z a zombie that is not reaped. Empty: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def pending_signals(pid):
    """Return the signals that wait for a process, as a bit mask."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["ShdPnd"], 16)


@pytest.fixture(scope="module")
def keys_path(tmp_path_factory):
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def house(tmp_path_factory, keys_path):
    keys = (
        f'[[keys]]\nname = "anne"\npublic_key = "{ANNE.public.decode()}"\n'
        f'[[keys]]\nname = "bert"\npublic_key = "{BERT.public.decode()}"\n'
        'scopes = ["read", "write"]\nprefixes = ["bert."]\n'
    )
    server_key = private_file(tmp_path_factory.mktemp("server") / "server.key", key_file_text(SERVER))
    with engine(
        wal={"shards": 2},
        gateway={"enabled": True},
        native={"endpoint": f"tcp://127.0.0.1:{free_port()}", "curve_key_file": server_key},
        auth={"keys_file": private_file(keys_path, keys)},
    ) as running:
        yield running


def address(house):
    port = house.info.gateway_tcp.rsplit(":", 1)[1]
    return f"ringlog://127.0.0.1:{port}?server_key={quote(SERVER.public, safe='')}"


def remote(house, key=ANNE, **options):
    return ringlog.connect(address(house), key=key.secret.decode(), **options)


@pytest.fixture(params=["ipc", "tcp"])
def client(request, house):
    if request.param == "tcp":
        made = remote(house, wait=10)
    else:
        made = ringlog.connect(house.url, transport="ipc", wait=10)
    yield made
    made.close()


def numbered(count):
    return [b"%d" % n for n in range(count)]


def test_records_appended_by_message_are_read_by_every_transport(house, client, topic):
    """Ring, ipc and tcp show the same state."""
    with client.producer(topic, max_frame_records=7) as out:
        for payload in numbered(500):
            out.send(payload, tag="even" if int(payload) % 2 == 0 else "odd")
    client.append(topic, b"x" * 900_000)
    assert [record.data for record in client.reader(topic)][:500] == numbered(500)
    page = client.read(topic, 10, limit=5)
    assert ([record.seq for record in page], page.cursor.seq) == ([11, 12, 13, 14, 15], 15)
    assert len(client.read(topic, tags="odd", limit=1000)) == 250
    with ringlog.connect(house.url) as local:
        assert [record.data for record in local.reader(topic)] == [r.data for r in client.reader(topic)]
        local.append(topic, b"from a ring")
    last = client.read(topic, 501)
    assert [record.data for record in last] == [b"from a ring"]
    assert last.caught_up


def test_a_topic_that_is_not_there_is_refused(client, ringlog_topic):
    with pytest.raises(TopicNotFound):
        client.read(ringlog_topic())


def test_an_append_wakes_only_the_long_polls_of_its_topic(client, ringlog_topic):
    """Twenty reads wait. Only the read of the topic that is written to returns a record."""
    topics = [ringlog_topic(str(n)) for n in range(20)]
    for topic in topics:
        client.append(topic, b"first")
    with ThreadPoolExecutor(20) as pool:
        waits = [pool.submit(client.read, topic, 1, wait_ms=3_000) for topic in topics]
        client.append(topics[7], b"second")
        assert [record.data for record in waits[7].result(3)] == [b"second"]
        others = [wait.result(10) for n, wait in enumerate(waits) if n != 7]
    assert all(page.caught_up and not len(page) for page in others)


def test_a_follower_reads_every_record_once_while_gateway_and_shards_are_killed(house, client, topic):
    """Appends and reads continue by themselves. No record is lost, duplicated or out of order."""
    count, got, problems = 3_000, [], []
    client.append(topic, b"0")

    def follow():
        try:
            for item in client.reader(topic, follow=True):
                got.append(int(item.data))
                if len(got) == count:
                    return
        except BaseException as e:
            problems.append(e)
            raise

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    with client.producer(topic, max_frame_records=3, linger_ms=1) as out:
        for n in range(1, count):
            out.send(b"%d" % n)
            if n == 1_000:
                out.flush(20)
                house.kill("gateway")
            if n == 2_000:
                out.flush(20)
                house.kill("wal_shard", shard=0)
                house.kill("wal_shard", shard=1)
    wait_until(
        lambda: len(got) == count or problems, 30, "the follower to see everything", lambda: str(len(got))
    )
    reader.join(5)
    assert not problems
    assert got == list(range(count))
    house.wait_ready("gateway")


def test_a_key_has_access_to_its_prefix_only(house):
    """Every operation outside its scopes or prefixes is refused (RF-106)."""
    with remote(house, BERT, wait=10) as bert:
        assert bert.append("bert.notes", b"mine").first_seq >= 1
        assert bert.read("bert.notes").records[-1].data == b"mine"
        for refused in (
            lambda: bert.append("anne.notes", b"not mine"),
            lambda: bert.read("anne.notes"),
            lambda: bert.topics.state("anne.notes"),
            lambda: bert.topics.create("bert.other", durability="fsync"),
            lambda: bert.topics.delete("bert.notes"),
        ):
            with pytest.raises(Forbidden):
                refused()
        with remote(house, wait=10) as anne:
            anne.append("anne.notes", b"hers")
            assert "anne.notes" in [t.topic for t in anne.topics.list()]
        assert {t.topic.split(".")[0] for t in bert.topics.list()} == {"bert"}


def test_an_unknown_key_is_refused_at_once(house):
    """The client learns that its key is the reason, and nothing else (RF-105)."""
    begun = time.monotonic()
    with pytest.raises(AuthFailed):
        remote(house, EVE, wait=60)
    for ask in (
        lambda stranger: stranger.append("bert.notes", b"x"),
        lambda stranger: stranger.read("bert.notes"),
        lambda stranger: list(stranger.topics.list()),
    ):
        with remote(house, EVE, timeout_ms=60_000) as stranger, pytest.raises(AuthFailed):
            ask(stranger)
    assert time.monotonic() - begun < 50


async def test_an_unknown_key_is_refused_with_asyncio(house):
    stranger = ringlog.aio.connect(address(house), key=EVE.secret.decode(), timeout_ms=60_000)
    with pytest.raises(AuthFailed):
        await stranger.append("bert.notes", b"x")
    with pytest.raises(AuthFailed):
        await stranger.wait_ready(60)
    await stranger.close(0)


def test_a_key_that_is_added_to_the_file_is_admitted(house, keys_path):
    """The same client continues after the earlier refusal."""
    before = keys_path.read_text()
    dora = new_key()
    with remote(house, dora, timeout_ms=10_000) as client:
        with pytest.raises(AuthFailed):
            client.append("dora.notes", b"x")
        added = f'[[keys]]\nname = "dora"\npublic_key = "{dora.public.decode()}"\n'
        keys_path.write_text(f'{before}{added}scopes = ["read", "write"]\nprefixes = ["dora."]\n')

        def is_admitted():
            try:
                client.append("dora.notes", b"in")
            except AuthFailed:
                return False
            return True

        wait_until(is_admitted, 20, "the key to be admitted")
        assert [each.data for each in client.read("dora.notes").records] == [b"in"]
        keys_path.write_text(before)


def test_a_key_is_revoked_without_a_restart(house, keys_path):
    """The revocation takes effect within five seconds, also on an open connection."""
    before = keys_path.read_text()
    with remote(house, BERT, wait=10) as bert:
        bert.append("bert.notes", b"still in")
        keys_path.write_text(before.split('[[keys]]\nname = "bert"')[0])

        def is_refused():
            try:
                bert.topics.state("bert.notes")
            except ringlog.errors.Unauthorized:
                return True
            return False

        wait_until(is_refused, 5, "the key to be refused")
        keys_path.write_text(before)
        wait_until(lambda: not is_refused(), 5, "the key to be admitted again")


def test_a_hangup_makes_the_gateway_read_the_keys_file(house):
    """Also a file that seems unchanged. A reload is logged."""

    def reloads():
        return house.log_path.read_text().count('"keys changed"')

    before = reloads()
    os.kill(house.pid_of("gateway"), signal.SIGHUP)
    wait_until(lambda: reloads() > before, 20, "the keys file to be read")
    with remote(house, ANNE, wait=10) as anne:
        anne.append("anne.notes", b"still in")


def test_no_log_and_no_command_line_contains_a_key(house):
    """This covers secret keys and the public keys of clients."""
    text = house.log_path.read_text()
    line = Path(f"/proc/{house.pid_of('gateway')}/cmdline").read_text()
    for secret in (SERVER.secret, ANNE.secret, ANNE.public, BERT.public):
        assert secret.decode() not in text
        assert secret.decode() not in line


def test_a_gateway_with_requests_to_a_stopped_shard_drains_in_time():
    """The gateway stops without its last answer. The client repeats the request with the next engine."""
    with engine(wal={"shards": 1}, gateway={"enabled": True}, supervisor={"drain_s": 4.0}) as running:
        shard, gateway = running.pid_of("wal_shard"), running.pid_of("gateway")
        with (
            ringlog.connect(running.url, wait=10, transport="ipc", timeout_ms=60_000) as client,
            ThreadPoolExecutor(2) as pool,
        ):
            client.append("t", b"x")
            with suspended(shard):
                held = pool.submit(client.append, "t", b"y")
                wait_until(lambda: client._shell.session.links.open_requests, 10.0, "the request to be sent")
                stopped = pool.submit(running.stop)
                wait_until(lambda: not Path(f"/proc/{gateway}").exists(), 20.0, "the gateway to end")
            assert stopped.result() == 0
            running.start()
            assert held.result(30.0).last_seq == 2
            assert [record.data for record in client.read("t").records] == [b"x", b"y"]


def test_a_stop_before_the_gateway_has_its_ring_drops_no_request():
    """In an earlier version the supervisor refused the ring, and the gateway held the append until its share
    of the drain time was over."""
    with engine(wal={"shards": 1}, gateway={"enabled": True}) as running:
        supervisor = running.pid
        with (
            ringlog.connect(running.url, wait=10, transport="ipc", timeout_ms=60_000) as client,
            ThreadPoolExecutor(2) as pool,
        ):
            client.topics.create("t")

            def is_sent():
                requests = list(client._shell.session.links._peer._requests.values())
                return any(each.kind == "Append" and each.was_sent for each in requests)

            with suspended(supervisor):
                held = pool.submit(client.append, "t", b"x")
                wait_until(is_sent, 10.0, "the append to be sent")
                # It uses the same connection and is later, so the gateway has received the append.
                assert client.topics.state("t").head_seq == 0
                assert not held.done()
                stopped = pool.submit(running.stop)
                wait_until(lambda: pending_signals(supervisor) & 1 << signal.SIGTERM - 1, 10.0, "the signal")
            assert stopped.result() == 0
            assert held.result(30.0).last_seq == 1
            assert "drain timed out" not in running.log_path.read_text()


def test_an_orphaned_gateway_does_not_wait_for_a_stopped_shard():
    """Without a supervisor no process ends a drain, and the next engine would wait for the gateway (RF-5)."""
    # The second incarnation of a shard pauses in its recovery.
    environ = {STOP_POINTS: ";recovery_before_copy:1:pause"}
    with engine(wal={"shards": 2}, gateway={"enabled": True}, environ=environ) as running:
        topics = [next(f"t{n}" for n in range(99) if home_shard(f"t{n}", 2) == shard) for shard in (0, 1)]
        gateway = running.pid_of("gateway")
        with (
            ringlog.connect(running.url, wait=10, transport="ipc", timeout_ms=60_000) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            for topic in topics:
                client.append(topic, b"x")
            running.kill("wal_shard", shard=0)
            shard = running.pid_of("wal_shard", 0)
            wait_until(lambda: state_of(shard) == "T", 20.0, "the successor to pause")
            try:
                held = pool.submit(client.topics.state, topics[0])
                links = client._shell.session.links
                wait_until(lambda: links.open_requests == 1, 10.0, "the request to be sent")
                # Both requests use one connection and this one is later, so the gateway has received both.
                client.append(topics[1], b"y")
                assert not held.done()
                running.kill("supervisor")
                wait_until(lambda: state_of(gateway) in "Z", ORPHAN_DRAIN_S + 4.0, "the gateway to end")
            finally:
                # The shard may have exited already: the kernel may resume stopped processes that are
                # orphaned.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(shard, signal.SIGCONT)
            wait_until(lambda: state_of(shard) in "Z", 20.0, "the shard to end")
            running.start()
            assert held.result(30.0).head_seq == 1
