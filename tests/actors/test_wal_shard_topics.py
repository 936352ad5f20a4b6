"""Requests by socket: topics are created, configured, listed and deleted; appends have keys and dedup ids."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.digests import DIGEST_BYTES, digest_of_id
from ringlog.envelope import messages as m
from ringlog.errors import (
    InvalidRequest,
    Status,
    Throttled,
    TopicIncompatible,
    TopicNotEmpty,
    TopicNotFound,
)
from ringlog.frame import encode_records, frame
from ringlog.frame.settle_entry import (
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COUNT_STATUS,
    S_FIRST_SEQ,
    S_HEAD_SEQ,
    WORDS,
    entry_error,
)
from ringlog.limits import DURATION_MS_MAX
from tests.support.checkpoint_world import checkpoint_all
from tests.support.disk_files import overwrite
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world, restart, started

WINDOW_MS = 1_000


class Producer:
    """Sends frames by message, each under its own number."""

    def __init__(self, world: World, producer: int = 9) -> None:
        self.world, self.producer, self.number = world, producer, 0

    def frame(self, *payloads: bytes, **options: Any) -> bytearray:
        self.number += 1
        options = {"producer_id": self.producer, "producer_seq": self.number, "topic_id": 0, **options}
        return frame(encode_records(list(payloads)), **options)

    def append(self, topic: str, *payloads: bytes, key: str = "", **options: Any) -> Any:
        """Send one frame and return its Appended reply."""
        message = m.Append(topic, 1, idempotency_key=key, **options)
        return self.world.request(message, self.frame(*payloads))


def numbers(appended: Any) -> tuple[int, int, bool]:
    """Return (first_seq, count, deduped) of the only entry."""
    entry = [int.from_bytes(appended.entries[i * 8 : i * 8 + 8], "little") for i in range(WORDS)]
    assert entry_error(entry, "") is None
    count_status = entry[S_COUNT_STATUS]
    return entry[S_FIRST_SEQ], count_status & 0xFFFFFFFF, bool(count_status >> FLAGS_SHIFT & FLAG_DEDUPED)


# -- topics ------------------------------------------------------------------------------------------------


def test_a_topic_is_created_once_and_survives_a_power_loss(world):
    """A repeated creation returns the same topic."""
    first = world.put_topic("a", durability="fsync", ttl_ms=5)
    again = world.put_topic("a", durability="fsync", ttl_ms=5)
    assert (first.created, again.created) == (True, False)
    assert (first.topic_id, first.epoch) == (again.topic_id, again.epoch)
    assert first.config == again.config
    assert first.config["ttl_ms"] == 5
    world.power_loss(1)
    world.start()
    info = world.request(m.TopicResolve("a"))
    assert (info.topic_id, info.epoch, info.config) == (first.topic_id, first.epoch, first.config)


def test_concurrent_creations_create_one_topic(world):
    """All requests are in one pass."""
    run = world.runs[0]
    run.step(*[run.request(500 + n, m.TopicPut("a", {"ttl_ms": n})) for n in range(5)])
    answers = [run.replies[500 + n] for n in range(5)]
    assert [answer.created for answer in answers] == [True, False, False, False, False]  # type: ignore[attr-defined]
    assert {answer.topic_id for answer in answers} == {world.topic("a").topic_id}  # type: ignore[attr-defined]
    restart(world)
    assert [topic.name for topic in world.runs[0].core.directory.by_id.values()] == ["a"]
    assert world.topic("a").config.ttl_ms == 4


def test_upsert_resets_omitted_settings_merge_keeps_them_and_create_changes_nothing(world):
    """The type of a topic cannot be changed."""
    world.put_topic("a", durability="fsync", ttl_ms=7, cap_records=3)
    assert world.put_topic("a", "merge", ttl_ms=8).config["cap_records"] == 3
    assert world.put_topic("a", "create", ttl_ms=9, type="queue").config["ttl_ms"] == 8
    assert world.put_topic("a", durability="fsync").config["ttl_ms"] == 0
    with pytest.raises(TopicIncompatible):
        world.put_topic("a", type="queue")
    with pytest.raises(TopicNotFound):
        world.put_topic("absent", "merge", ttl_ms=1)
    with pytest.raises(InvalidRequest, match="mode"):
        world.put_topic("a", "replace")
    restart(world)
    assert world.topic("a").config.ttl_ms == 0


def test_invalid_names_and_configurations_are_refused_before_they_are_logged(world):
    """A refusal creates no topic."""
    run, offset = world.runs[0], world.runs[0].core.log.offset
    for message in (
        m.TopicPut("../x"), m.TopicPut(""), m.TopicPut("a" * 256), m.TopicPut("a", {"ttl_ms": "x"}),
        m.TopicPut("a", {"type": "heap"}), m.Append("../x", 1, create=True),
    ):  # fmt: skip
        answer = world.ask(run, message, Producer(world).frame(b"x"))
        assert isinstance(answer, m.ErrorReply), message
        assert answer.status == Status.INVALID_REQUEST
    assert run.core.log.offset == offset
    assert not run.core.directory.by_id


def test_the_number_of_topics_is_bounded(world):
    """The deletion of a topic makes room for another one."""
    world = started(topics_max=2)
    world.put_topic("a")
    world.put_topic("b")
    for make in (lambda: world.put_topic("c"), lambda: Producer(world).append("c", b"x", create=True)):
        with pytest.raises(Throttled) as refused:
            make()
        assert refused.value.detail["max"] == 2
    assert world.put_topic("a").created is False, "configuring is always allowed"
    world.request(m.TopicDelete("a"))
    assert world.put_topic("c").created


def test_a_topic_without_a_slot_in_shared_memory_is_refused_before_it_is_logged(world):
    world.put_topic("a")
    core = world.runs[0].core
    core.requests.topics.free_slots = 1
    world.put_topic("b")
    core.requests.topics.free_slots = 0
    with pytest.raises(Throttled, match="shared memory has no room"):
        world.put_topic("c")
    assert {topic.name for topic in core.directory.by_id.values()} == {"a", "b"}
    core.requests.topics.free_slots = 1
    assert world.put_topic("c").created


def test_a_deleted_topic_stays_deleted_and_its_name_is_free(world):
    """A recreated topic has a greater id and a greater epoch."""
    first = world.put_topic("a", durability="fsync")
    world.append("a", [b"x"])
    assert world.request(m.TopicDelete("a")).deleted
    assert not world.request(m.TopicDelete("a")).deleted
    for message in (m.TopicState("a"), m.TopicResolve("a"), m.Locate("a", 0), m.ProducerState("a", 1)):
        with pytest.raises(TopicNotFound):
            world.request(message)
    world.power_loss(1)
    world.start()
    with pytest.raises(TopicNotFound):
        world.request(m.TopicState("a"))
    second = world.put_topic("a", durability="fsync")
    assert second.epoch > first.epoch
    assert second.topic_id > first.topic_id
    assert world.append("a", [b"y"], producer=2) == 1
    restart(world)
    assert world.records("a") == [(1, b"y")]


def test_delete_if_empty_sees_staged_records(world):
    """The check and the deletion are one step."""
    world.put_topic("a", durability="fsync")
    run = world.runs[0]
    run.step(
        run.frames(1, world.frame_for("a", [b"x"])),
        run.request(500, m.TopicDelete("a", if_empty=True)),
    )
    answer = run.replies[500]
    assert isinstance(answer, m.ErrorReply)
    assert answer.status == Status.TOPIC_NOT_EMPTY
    with pytest.raises(TopicNotEmpty):
        world.request(m.TopicDelete("a", if_empty=True))
    world.put_topic("b")
    assert world.request(m.TopicDelete("b", if_empty=True)).deleted


def test_delete_and_create_in_one_commit_batch_keep_the_epochs_separate(world):
    """The batch contains frames of both epochs, and replay must distinguish them."""
    world.put_topic("a", durability="fsync")
    run = world.runs[0]
    run.step(
        run.frames(1, world.frame_for("a", [b"old"])),
        run.request(500, m.TopicDelete("a")),
        run.request(501, m.TopicPut("a", {"durability": "fsync"})),
        run.request(502, m.Append("a", 1), Producer(world).frame(b"new")),
    )
    assert numbers(run.replies[502]) == (1, 1, False)
    for end in (world.kill, world.stop, lambda: world.power_loss(5)):
        assert world.records("a") == [(1, b"new")]
        end()
        world.start()


def test_lists_are_paged_in_name_order(world):
    """The order is that of the bytes of the names."""
    for name in ("b", "a", "ab", "abc", "c", "A", "a.1"):
        world.put_topic(name)
    run = world.runs[0]

    def names_of(**query: Any) -> tuple[list[str], bool]:
        answer = world.ask(run, m.TopicList(**query))
        assert isinstance(answer, m.TopicListReply)
        return [state.topic for state in answer.topics], answer.more

    assert names_of() == (["A", "a", "a.1", "ab", "abc", "b", "c"], False)
    assert names_of(page_size=2) == (["A", "a"], True)
    assert names_of(after="a", page_size=2) == (["a.1", "ab"], True)
    assert names_of(prefix="ab") == (["ab", "abc"], False)
    assert names_of(prefix="ab", after="ab", page_size=1) == (["abc"], False)
    assert names_of(prefix="x") == ([], False)
    assert names_of(after="c") == ([], False)
    assert names_of(page_size=-3)[0] == ["A"]


def test_a_topic_changed_from_ephemeral_to_fsync_keeps_later_records(world):
    """Seqs continue above the ephemeral ones. Their loss is reported after a restart."""
    world.put_topic("a", durability="ephemeral")
    world.append("a", [b"e1", b"e2"])
    world.put_topic("a", durability="fsync")
    assert world.append("a", [b"f"]) == 3
    assert world.records("a")[-1] == (3, b"f")
    for end in (lambda: world.power_loss(2), world.stop):
        end()
        world.start()
        assert world.records("a") == [(3, b"f")]
        assert world.topic("a").lost == [(1, 2)]
    assert world.append("a", [b"g"], producer=3) == 4


def test_a_topic_changed_to_fsync_needs_no_reservation(world):
    """No loss is reported for a topic that can lose nothing."""
    world.put_topic("a", durability="disk")
    world.append("a", [b"x"])
    world.put_topic("a", durability="fsync")
    world.append("a", [b"y"])
    world.power_loss(1)
    world.start()
    assert world.topic("a").lost == []
    assert world.append("a", [b"z"], producer=2) == 3


def test_unknown_and_invalid_requests_are_refused_and_end_no_shard(world):
    """The requests are hostile or malformed."""
    run = world.runs[0]
    for message, attachment in (
        (m.RingOpen("c", 1, 0), None),
        (m.Append("a", 1, create=True), None),
        (m.Append("a", 1, create=True), bytearray(7)),
        (m.Append("a", 2, create=True), Producer(world).frame(b"x")),
        (m.Append("a", 1, create=True), bytearray(b"\xff" * 64)),
        (m.Append("a", 1, create=True, idempotency_key="k" * 257), Producer(world).frame(b"x")),
        (m.Append("a", 1, create=True), Producer(world).frame(b"x", topic_id=4711)),
        (m.Hello(99, "x"), None),
    ):
        answer = world.ask(run, message, attachment)
        assert isinstance(answer, m.ErrorReply), message
        assert answer.status == Status.INVALID_REQUEST
    assert not run.core.directory.by_id, "a refused write must not create its topic"


def test_a_refused_write_creates_no_topic(world):
    """Limits are checked before the creation. With one valid frame the topic is created."""
    producer = Producer(world)
    corrupt = producer.frame(b"x" * 40)
    corrupt[-1] ^= 1
    answer = world.request(m.Append("a", 1, create=True), corrupt)
    entry = [int.from_bytes(answer.entries[i * 8 : i * 8 + 8], "little") for i in range(WORDS)]
    error = entry_error(entry, "a")
    assert error is not None
    assert error.status == Status.CORRUPT_FRAME
    assert (answer.created, answer.topic_id) == (False, 0)
    with pytest.raises(TopicNotFound):
        world.request(m.TopicResolve("a"))
    both = world.request(m.Append("a", 2, create=True), corrupt + producer.frame(b"sound"))
    assert both.created
    assert world.records("a") == [(1, b"sound")]


def test_an_append_creates_a_topic_only_if_requested(world):
    """The configuration in a request applies only to a topic that it creates."""
    producer = Producer(world)
    with pytest.raises(TopicNotFound):
        producer.append("a", b"x")
    made = producer.append("a", b"x", create=True, config={"durability": "fsync", "ttl_ms": 3})
    assert made.created
    assert world.topic("a").config.ttl_ms == 3
    again = producer.append("a", b"y", create=True, config={"ttl_ms": 4})
    assert not again.created
    assert world.topic("a").config.ttl_ms == 3, "an inline configuration of an existing topic must be ignored"
    with pytest.raises(InvalidRequest):
        producer.append("a", b"z", config={"ttl_ms": "bad"})


def test_producer_state_returns_the_last_settled_frame(world):
    """The state survives a kill."""
    world.put_topic("a", durability="fsync")
    assert world.request(m.ProducerState("a", 9)).producer_seq == 0
    Producer(world).append("a", b"x", b"y")
    for end in (None, world.kill):
        if end is not None:
            end()
            world.start()
        state = world.request(m.ProducerState("a", 9))
        assert (state.producer_seq, state.first_seq, state.count) == (1, 1, 2)


def test_a_truncated_list_of_extents_does_not_end_with_the_open_file(world, monkeypatch):
    """A reader of such a list would skip records."""
    world.put_topic("a", durability="fsync")
    for i in range(8):
        world.append("a", [b"%d" % i * 40_000])
    whole = world.request(m.Locate("a", 0)).extents
    assert len(whole) > 2
    assert whole[-1].stop == 0
    monkeypatch.setattr("ringlog.actors.wal_shard.requests.record_locations.EXTENTS_PER_LOCATE_MAX", 2)
    short = world.request(m.Locate("a", 0)).extents
    assert short == whole[:2]


# -- idempotency keys --------------------------------------------------------------------------------------


@pytest.fixture
def keyed(world: World) -> World:
    world.put_topic("a", durability="fsync", idempotency_window_ms=WINDOW_MS)
    return world


def test_a_key_is_one_write_within_its_window(keyed):
    """Within its window one key is one write (W10). A repeat returns the original seqs."""
    producer = Producer(keyed)
    assert numbers(producer.append("a", b"x", b"y", key="k")) == (1, 2, False)
    assert numbers(producer.append("a", b"other", key="k")) == (1, 2, True)
    assert numbers(producer.append("a", b"z", key="other")) == (3, 1, False)
    assert numbers(producer.append("a", b"z", key="")) == (4, 1, False)
    assert len(keyed.records("a")) == 4


@pytest.mark.parametrize(
    ("elapsed_us", "is_repeat"), [(1_000_000, True), (1_000_999, True), (1_001_000, False), (999_999, True)]
)
def test_the_window_ends_after_its_last_millisecond(keyed, elapsed_us, is_repeat):
    """A key is valid while now - created <= window, with both times rounded down to milliseconds."""
    assert keyed.clock.now_us() % 1_000 == 0
    producer = Producer(keyed)
    producer.append("a", b"x", key="k")
    keyed.clock.advance(elapsed_us / 1e6)
    assert numbers(producer.append("a", b"x", key="k"))[2] is is_repeat


def test_a_window_of_zero_disables_keys(world):
    """Every append is a new write."""
    world.put_topic("a", durability="fsync", idempotency_window_ms=0)
    producer = Producer(world)
    assert [numbers(producer.append("a", b"x", key="k"))[0] for _ in range(3)] == [1, 2, 3]
    restart(world)
    assert numbers(producer.append("a", b"x", key="k"))[0] == 4


def test_keys_belong_to_one_topic_and_epoch(keyed):
    """A recreated topic has no old keys."""
    keyed.put_topic("b", durability="fsync")
    producer = Producer(keyed)
    producer.append("a", b"x", key="k")
    assert numbers(producer.append("b", b"x", key="k")) == (1, 1, False)
    keyed.request(m.TopicDelete("a"))
    keyed.put_topic("a", durability="fsync")
    assert numbers(producer.append("a", b"x", key="k")) == (1, 1, False)


def test_concurrent_writes_of_one_key_are_one_write(keyed):
    """The writes are in one commit batch. Each reply has a head that includes the record."""
    run, producer = keyed.runs[0], Producer(keyed)
    requests = [
        run.request(500 + n, m.Append("a", 1, idempotency_key="k"), producer.frame(b"%d" % n))
        for n in range(4)
    ]
    run.step(*requests)
    answers = [numbers(run.replies[500 + n]) for n in range(4)]
    assert answers == [(1, 1, False), (1, 1, True), (1, 1, True), (1, 1, True)]
    for n in range(4):
        entries = run.replies[500 + n].entries  # type: ignore[attr-defined]
        assert int.from_bytes(entries[S_HEAD_SEQ * 8 : S_HEAD_SEQ * 8 + 8], "little") == 1
    assert keyed.records("a") == [(1, b"0")]


def test_a_failed_write_leaves_its_key_unused(keyed):
    """The key can be used when the topic has space again."""
    keyed.put_topic("a", "merge", cap_records=1, discard="reject")
    producer = Producer(keyed)
    producer.append("a", b"x")
    refused = keyed.request(m.Append("a", 1, idempotency_key="k"), producer.frame(b"y"))
    entry = [int.from_bytes(refused.entries[i * 8 : i * 8 + 8], "little") for i in range(WORDS)]
    assert entry_error(entry, "a").status == Status.TOPIC_FULL
    keyed.put_topic("a", "merge", cap_records=5)
    assert numbers(producer.append("a", b"y", key="k")) == (2, 1, False)


def test_keys_survive_restarts_with_their_age(keyed):
    """A restart makes keys valid neither longer nor shorter."""
    producer = Producer(keyed)
    producer.append("a", b"x", key="old")
    keyed.clock.advance(0.6)
    producer.append("a", b"y", key="young")
    for end in (keyed.kill, keyed.stop, lambda: keyed.power_loss(7)):
        end()
        keyed.start()
        assert numbers(producer.append("a", b"other", key="old")) == (1, 1, True)
        assert numbers(producer.append("a", b"other", key="young")) == (2, 1, True)
    keyed.clock.advance(0.6)
    keyed.kill()
    keyed.start()
    assert numbers(producer.append("a", b"x", key="old"))[2] is False
    assert numbers(producer.append("a", b"y", key="young")) == (2, 1, True)


@pytest.mark.parametrize("size", [10, 3_000, 9_000])
@pytest.mark.parametrize("how", ["kill", "stop", "power loss"])
def test_keys_survive_restarts_wherever_the_read_buffers_end(keyed, monkeypatch, how, size):
    """The log is read in buffers. The frame of a key and its append may be on both sides of an end."""
    monkeypatch.setattr("ringlog.storage.recovery.RECOVERY_READ_BYTES", 4_096)
    producer = Producer(keyed)
    ends = {"kill": keyed.kill, "stop": keyed.stop, "power loss": lambda: keyed.power_loss(7)}
    for n in range(60):
        producer.append("a", b"x" * size, key=f"k{n}")
    for _ in range(2):
        ends[how]()
        keyed.start()
    assert [n for n in range(60) if not numbers(producer.append("a", b"other", key=f"k{n}"))[2]] == []


def test_a_key_without_its_append_is_ignored(keyed):
    """A power loss takes the append and leaves the key. Another write then gets the seq."""
    producer = Producer(keyed)
    producer.append("a", b"first")
    run = keyed.runs[0]
    used = run.core.log.offset
    keyed.request(m.Append("a", 1, idempotency_key="k"), producer.frame(b"keyed"))
    path = f"{DATA}/wal/shard-00/wal-1-0.log"
    data = bytearray(run.read("wal/shard-00/wal-1-0.log"))
    at = data.index(b"keyed", used)
    data[at - 40 : at + 8] = bytes(48)
    keyed.kill()
    disk = keyed.disk
    overwrite(disk, path, bytes(data))
    keyed.reboot()
    keyed.start()
    assert keyed.records("a") == [(1, b"first")]
    other = Producer(keyed, producer=44)
    assert numbers(other.append("a", b"somebody else's")) == (2, 1, False)
    for _ in range(2):
        keyed.kill()
        keyed.start()
    assert numbers(other.append("a", b"keyed", key="k")) == (3, 1, False), "a first use, not a repeat of 2"


def test_a_shorter_window_applies_at_once_and_a_backward_clock_extends_nothing(keyed):
    """A write with a key that has expired is a new write."""
    producer = Producer(keyed)
    producer.append("a", b"x", key="k")
    keyed.clock.advance(0.5)
    keyed.put_topic("a", "merge", idempotency_window_ms=100)
    assert numbers(producer.append("a", b"x", key="k"))[2] is False
    keyed.put_topic("a", "merge", idempotency_window_ms=WINDOW_MS)
    producer.append("a", b"y", key="late")
    keyed.clock.advance(0.9)
    producer.append("a", b"z", key="newest")
    keyed.clock.step(-0.9)
    keyed.clock.advance(0.2)
    producer.append("a", b"z", key="other")
    keyed.clock.advance(0.85)
    assert numbers(producer.append("a", b"y", key="late"))[2] is False


def test_a_key_covers_exactly_one_frame(keyed):
    producer = Producer(keyed)
    with pytest.raises(InvalidRequest, match="one frame"):
        keyed.request(m.Append("a", 2, idempotency_key="k"), producer.frame(b"x") + producer.frame(b"y"))


# -- dedup ids -----------------------------------------------------------------------------------------------


def ids_of(*names: str) -> bytes:
    """Return dedup ids as a message contains them. An empty name means no id."""
    return b"".join(digest_of_id(name) if name else bytes(DIGEST_BYTES) for name in names)


def known(appended: Any) -> list[int]:
    """Return the seqs of records that existed already."""
    return [int.from_bytes(appended.known[at : at + 8], "little") for at in range(0, len(appended.known), 8)]


def test_records_with_ids_are_one_write_and_each_is_known_later(keyed):
    """A hit returns the seq of the record. A write with some known ids appends nothing."""
    producer = Producer(keyed)
    first = producer.append("a", b"x", b"y", b"z", ids=ids_of("1", "", "3"))
    assert (numbers(first), known(first)) == ((1, 3, False), [])
    whole = producer.append("a", b"other", b"other", ids=ids_of("3", "1"))
    assert (numbers(whole), known(whole)) == ((3, 2, True), [3, 1])
    some = producer.append("a", b"v", b"x", b"w", ids=ids_of("4", "1", ""))
    assert (numbers(some)[1:], known(some)) == ((0, True), [0, 1, 0])
    assert len(keyed.records("a")) == 3
    assert numbers(producer.append("a", b"v", b"w", ids=ids_of("4", ""))) == (4, 2, False)
    assert numbers(producer.append("a", b"x", key="1")) == (6, 1, False), "an idempotency key is no dedup id"


def test_a_repeated_write_with_ids_is_recognised_after_its_seqs_were_forgotten(keyed):
    """Records without an id are known by their frame only, so none of them may be appended again."""
    producer = Producer(keyed)
    message = m.Append("a", 1, ids=ids_of("1", ""))
    mixed = producer.frame(b"x", b"y")
    assert numbers(keyed.request(message, bytearray(mixed))) == (1, 2, False)
    other = Producer(keyed, 8)
    for data in (b"p", b"q"):
        other.append("a", data)
        producer.append("a", data)
    for _, past in keyed.topic("a").producers.items():  # noqa: PERF102  not a dict
        past.forget_seqs(1)
    again = keyed.request(message, bytearray(mixed))
    assert (numbers(again), known(again)) == ((0, 2, True), [])
    assert len(keyed.records("a")) == 6


def test_a_repeated_write_is_recognised_as_a_whole_with_and_without_ids(keyed):
    """Once, records without an id were appended twice when the reply to a mixed write was lost."""
    producer = Producer(keyed)
    producer.append("a", b"old", ids=ids_of("old"))
    mixed, ids = producer.frame(b"x", b"y", b"z"), ids_of("1", "", "3")
    message = m.Append("a", 1, ids=ids)
    first = keyed.request(message, bytearray(mixed))
    assert (numbers(first), known(first)) == ((2, 3, False), [])
    some = producer.append("a", b"o", b"n", ids=ids_of("old", ""))
    assert known(some) == [1, 0]
    for end in (lambda: None, keyed.kill, lambda: keyed.power_loss(7), lambda: keyed.clock.advance(1.1)):
        end()
        if not keyed.runs:
            keyed.start()
        again = keyed.request(message, bytearray(mixed))
        assert (numbers(again), known(again)) == ((2, 3, True), []), (
            "a repeat must be recognised by its frame number"
        )
    assert [data for _, data in keyed.records("a")] == [b"old", b"x", b"y", b"z"]


def test_ids_survive_restarts_and_checkpoints_do_not_lengthen_their_windows(keyed):
    """Each id is known after any restart, for its own window and no longer."""
    producer = Producer(keyed)
    producer.append("a", b"x", ids=ids_of("usual"))
    producer.append("a", b"y", ids=ids_of("short"), window_ms=500)
    producer.append("a", b"z", ids=ids_of("long"), window_ms=DURATION_MS_MAX)
    for end in (keyed.kill, keyed.stop, lambda: keyed.power_loss(7)):
        end()
        keyed.start()
        assert known(producer.append("a", b"other", ids=ids_of("short"))) == [2]
        assert known(producer.append("a", b"other", ids=ids_of("usual"))) == [1]
    keyed.clock.advance(0.6)
    keyed.kill()
    keyed.start()
    assert numbers(producer.append("a", b"y", ids=ids_of("short"))) == (4, 1, False)
    assert known(producer.append("a", b"x", b"z", ids=ids_of("usual", "long"))) == [1, 3]
    keyed.clock.advance(0.6)
    assert numbers(producer.append("a", b"x", b"z", ids=ids_of("usual", "long"))) == (5, 2, False)


def test_concurrent_writes_of_one_id_are_one_record(keyed):
    """The writes are in one commit batch. Later writes return the seq that the first one will get."""
    run, producer = keyed.runs[0], Producer(keyed)
    requests = [
        run.request(500 + n, m.Append("a", 1, ids=ids_of("k")), producer.frame(b"%d" % n)) for n in range(3)
    ]
    run.step(*requests)
    assert [known(run.replies[500 + n]) for n in range(3)] == [[], [1], [1]]
    assert keyed.records("a") == [(1, b"0")]


def test_ids_of_a_failed_write_stay_unused_and_a_window_of_zero_disables_ids(keyed):
    """The failure is `TOPIC_FULL`."""
    keyed.put_topic("a", "merge", cap_records=1, discard="reject")
    producer = Producer(keyed)
    producer.append("a", b"x")
    refused = producer.append("a", b"y", ids=ids_of("k"))
    entry = [int.from_bytes(refused.entries[i * 8 : i * 8 + 8], "little") for i in range(WORDS)]
    assert entry_error(entry, "a").status == Status.TOPIC_FULL
    keyed.put_topic("a", "merge", cap_records=9)
    assert numbers(producer.append("a", b"y", ids=ids_of("k"))) == (2, 1, False)
    keyed.put_topic("a", "merge", idempotency_window_ms=0)
    assert [numbers(producer.append("a", b"y", ids=ids_of("k")))[0] for _ in range(2)] == [3, 4]


def test_a_full_table_forgets_the_ids_that_expire_first_and_counts_them(keyed):
    """The table is bounded by `idempotency_max`, which can be changed."""
    keyed.put_topic("a", "merge", idempotency_max=2)
    producer = Producer(keyed)
    for each in ("1", "2", "3"):
        producer.append("a", b"x", ids=ids_of(each))
    state = keyed.request(m.TopicState("a"))
    assert (state.keys, state.keys_forgotten) == (2, 1)
    assert numbers(producer.append("a", b"x", ids=ids_of("1"))) == (4, 1, False)
    assert known(producer.append("a", b"x", ids=ids_of("3"))) == [3]


@pytest.mark.parametrize(
    ("payloads", "ids", "key"),
    [
        ((b"x",), ids_of("1", "2"), ""),
        ((b"x", b"y"), ids_of("1"), ""),
        ((b"x",), ids_of("1")[:-1], ""),
        ((b"x", b"y"), ids_of("1", "1"), ""),
        ((b"x",), ids_of("1"), "key"),
        ((b"x",) * 1_001, ids_of(*map(str, range(1_001))), ""),
    ],
)
def test_ids_that_do_not_match_their_records_are_refused_and_nothing_is_written(keyed, payloads, ids, key):
    """Wrong counts, wrong lengths, repeated ids, an additional key, and too many records."""
    producer = Producer(keyed)
    answer = keyed.ask(
        keyed.runs[0], m.Append("a", 1, ids=ids, idempotency_key=key), producer.frame(*payloads)
    )
    assert isinstance(answer, m.ErrorReply)
    assert answer.status == Status.INVALID_REQUEST
    assert keyed.records("a") == []


def test_ids_and_keys_are_restored_from_a_snapshot():
    """The log files are absorbed. Each id and key keeps the rest of its window."""
    world = new_world()
    world.put_topic("a", durability="fsync", idempotency_window_ms=WINDOW_MS)
    producer = Producer(world)
    producer.append("a", b"x", b"y", ids=ids_of("1", "2"))
    producer.append("a", b"z", ids=ids_of("short"), window_ms=500)
    producer.append("a", b"w", key="k")
    world.clock.advance(0.4)
    for _ in range(2):
        checkpoint_all(world)
        restart(world)
        assert known(producer.append("a", b"o", b"o", ids=ids_of("2", "short"))) == [2, 3]
        assert numbers(producer.append("a", b"o", key="k")) == (4, 1, True)
    world.clock.advance(0.2)
    assert known(producer.append("a", b"o", b"o", ids=ids_of("1", "short"))) == [1, 0]
