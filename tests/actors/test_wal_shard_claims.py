"""Named producers: one owner at a time, and no ack of a frame that is not stored (W11)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, ProducerFenced, StorageReadOnly, Throttled
from ringlog.frame.settle_entry import FLAG_DEDUPED, FLAGS_SHIFT, S_COUNT_STATUS, S_FIRST_SEQ, entry_error
from ringlog.types import SESSION_BIT
from tests.support.checkpoint_world import checkpoint_all
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world, restart

NAMED = 77


class Owner:
    """One process that opens a named producer: it claims the name and continues after the last number."""

    def __init__(self, world: World, topic: str, owner: int, producer: int = NAMED) -> None:
        self.world, self.topic, self.owner, self.producer = world, topic, owner, producer
        self.claim = self.next = 0
        self.acked: list[bytes] = []

    def open(self) -> Owner:
        state = self.world.request(m.ProducerState(self.topic, self.producer, self.owner))
        self.claim, self.next = state.claim, state.producer_seq + 1
        return self

    def frame(self, payload: bytes, number: int = 0) -> bytearray:
        return self.world.frame_for(
            self.topic, [payload], producer=self.producer, seq=number or self.next, claim=self.claim
        )

    def send(self, payload: bytes, number: int = 0) -> bool:
        """Send one record and return whether it was a repeat. Raises the refusal."""
        entry = self.world.send(self.topic, [self.frame(payload, number)])[0]
        error = entry_error(entry, self.topic)
        if error is not None:
            raise error
        self.next += not number
        self.acked.append(payload)
        return bool(int(entry[S_COUNT_STATUS]) >> FLAGS_SHIFT & FLAG_DEDUPED)


def stored(world: World, topic: str) -> list[bytes]:
    return [payload for _, payload in world.records(topic)]


def restarts() -> Any:
    """Parametrize a test with every event after which the engine must still know the owner of a name."""

    def nothing(world: World) -> None:
        pass

    def kill(world: World) -> None:
        restart(world)

    def power(world: World) -> None:
        world.power_loss(3)
        world.start()

    def checkpoint(world: World) -> None:
        checkpoint_all(world)
        kill(world)

    def shards(world: World) -> None:
        world.kill()
        world.shards = 3
        world.start()

    return pytest.mark.parametrize("restart", [nothing, kill, power, checkpoint, shards])


@restarts()
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory", "ephemeral"])
def test_the_latest_claimant_of_a_name_owns_it_and_the_earlier_one_is_fenced(restart, durability):
    world = new_world()
    world.put_topic("a", durability=durability)
    first = Owner(world, "a", 1).open()
    first.send(b"first")
    second = Owner(world, "a", 2).open()
    restart(world)
    for _ in range(2):
        with pytest.raises(ProducerFenced) as fenced:
            first.send(b"late")
        assert fenced.value.outcome == "not_applied"
        assert not fenced.value.retriable
        second.send(b"second")
    if durability == "fsync":
        assert stored(world, "a") == [b"first", b"second", b"second"]


@restarts()
def test_an_owner_continues_under_its_claim_and_its_repeats_are_recognised(restart):
    """A restart of the engine does not end a claim."""
    world = new_world()
    world.put_topic("a", durability="fsync")
    owner = Owner(world, "a", 1).open()
    owner.send(b"one")
    restart(world)
    assert owner.send(b"one", number=1)
    assert not owner.send(b"two")
    held = world.request(m.ProducerState("a", NAMED, 1, owner.claim))
    assert (held.claim, held.producer_seq) == (owner.claim, 2)
    assert stored(world, "a") == [b"one", b"two"]


def test_repeating_a_claim_after_a_lost_reply_changes_nothing(world):
    world.put_topic("a", durability="fsync")
    owner = Owner(world, "a", 1).open()
    assert world.request(m.ProducerState("a", NAMED, 1)).claim == owner.claim
    owner.send(b"x")


def test_a_repeat_by_an_earlier_owner_has_an_unknown_outcome(world):
    """The frame is sent again after a crash, and after another claim. The shard cannot know whether the
    stored frame is the same one."""
    world.put_topic("a", durability="fsync")
    first = Owner(world, "a", 1).open()
    first.send(b"stored")
    Owner(world, "a", 2).open()
    with pytest.raises(ProducerFenced) as fenced:
        first.send(b"stored", number=1)
    assert fenced.value.outcome == "unknown"


@pytest.mark.parametrize("kept", [b"owner's", b"zombie's"])
def test_a_number_that_the_owner_used_is_no_repeat_for_an_earlier_owner(world, kept):
    """This fault once lost 200 of 400 acked records."""
    world.put_topic("a", durability="fsync")
    first, second = Owner(world, "a", 1).open(), Owner(world, "a", 2).open()
    assert first.next == second.next == 1
    second.send(b"owner's")
    with pytest.raises(ProducerFenced) as fenced:
        first.send(kept, number=1)
    assert fenced.value.outcome == "not_applied"
    assert stored(world, "a") == [b"owner's"]


def test_frames_of_two_owners_in_one_ring_get_separate_results(world):
    world.put_topic("a", durability="fsync")
    first = Owner(world, "a", 1).open()
    second = Owner(world, "a", 2).open()
    mixed = [first.frame(b"f", 1), second.frame(b"s", 1), first.frame(b"f", 2), second.frame(b"s", 2)]
    entries = world.send("a", mixed)
    found = [entry_error(entry, "a") for entry in entries]
    assert [type(error) for error in found] == [ProducerFenced, type(None)] * 2
    assert [int(entries[row][S_FIRST_SEQ]) for row in (1, 3)] == [1, 2]


def test_a_name_is_claimed_for_each_topic_and_epoch(world):
    world.put_topic("a", durability="fsync")
    world.put_topic("b", durability="fsync")
    on_a, on_b = Owner(world, "a", 1).open(), Owner(world, "b", 1).open()
    Owner(world, "a", 2).open()
    on_b.send(b"mine")
    with pytest.raises(ProducerFenced):
        on_a.send(b"x")
    world.request(m.TopicDelete("a", False))
    world.put_topic("a", durability="fsync")
    assert Owner(world, "a", 3).open().claim == 1


def test_an_outdated_claim_is_fenced_and_takes_nothing_back(world):
    world.put_topic("a", durability="fsync")
    first = Owner(world, "a", 1).open()
    second = Owner(world, "a", 2).open()
    with pytest.raises(ProducerFenced):
        world.request(m.ProducerState("a", NAMED, 1, first.claim))
    second.send(b"x")


def test_a_query_without_an_owner_claims_nothing_and_only_named_producers_are_claimed(world):
    world.put_topic("a", durability="fsync")
    owner = Owner(world, "a", 1).open()
    assert world.request(m.ProducerState("a", NAMED)).claim == owner.claim
    owner.send(b"x")
    for producer in (SESSION_BIT, SESSION_BIT | 5, 0, -1, 1 << 70):
        with pytest.raises(InvalidRequest, match="producer_id must be that of a named producer"):
            world.request(m.ProducerState("a", producer, 5))
    checkpoint_all(world)
    restart(world)


def test_frames_without_a_claim_are_fenced_once_a_name_has_an_owner(world):
    """The sender uses the producer's id and does not know claims."""
    world.put_topic("a", durability="fsync")
    world.append("a", [b"before"], producer=NAMED)
    Owner(world, "a", 1).open()
    with pytest.raises(ProducerFenced):
        world.append("a", [b"after"], producer=NAMED)


def test_a_full_table_of_named_producers_throttles_another_one(world):
    world.put_topic("a", durability="fsync")
    world.topic("a").producers._most = 2
    for producer in (1, 2):
        Owner(world, "a", 1, producer).open()
    with pytest.raises(Throttled, match="named producers"):
        Owner(world, "a", 1, 3).open()


def test_a_read_only_shard_accepts_no_claims(world):
    world.put_topic("a", durability="fsync")
    world.kill()
    world.start_shard(0, is_read_only=True)
    assert world.request(m.ProducerState("a", NAMED)).claim == 0
    with pytest.raises(StorageReadOnly):
        world.request(m.ProducerState("a", NAMED, 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_acked_frames_are_stored_once_under_any_claims_and_crashes(seed):
    """Owners open the name, send, and send again. Shards die, make checkpoints, and change their number."""
    rng = random.Random(seed)
    world = new_world()
    world.put_topic("a", durability="fsync")
    owners: list[Owner] = []
    acked: list[bytes] = []
    for step in range(120):
        match rng.randrange(12):
            case 0 | 1:
                owners.append(Owner(world, "a", step + 1).open())
            case 2:
                world.kill()
                world.shards = rng.choice([1, 1, 2, 3])
                world.start()
            case 3:
                checkpoint_all(world)
            case 4:
                world.power_loss(step)
                world.start()
            case _ if owners:
                owner = rng.choice(owners[-3:])
                payload = b"%d" % step
                if owner is not owners[-1]:
                    with pytest.raises(ProducerFenced):
                        owner.send(payload)
                    continue
                assert not owner.send(payload)
                acked.append(payload)
                if rng.random() < 0.3:
                    assert owner.send(payload, number=owner.next - 1)
    assert stored(world, "a") == acked
