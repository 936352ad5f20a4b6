"""Final checks after the last fault: all data is served, stable over two restarts, and verified offline."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.rigs.judge import write_files
from chaos.world.clients import Producer
from chaos.world.engine import COLD, Engine
from chaos.world.model import Model
from chaos.world.readers import Reader
from chaos.world.tasks import NS
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.envelope import messages as m
from ringlog.errors import NotReady, RinglogError, TopicNotFound
from tests.support.shard_world import DATA

PAGES_MAX = 400
TRIES = 40
ROUNDS_MAX = 12
"""Maximum number of rounds, about 1 s apart, until each topic accepts records."""
Rest = Callable[[str, Callable[[], bool]], None]


class Examiner:
    """Checks a world without further faults."""

    def __init__(self, engine: Engine, model: Model, configs: dict[str, dict[str, Any]], rest: Rest) -> None:
        self.engine, self.model, self.configs, self.rest = engine, model, configs, rest
        self.began = model.now()

    def run_all_checks(self, producers: list[Producer], rng: random.Random) -> None:
        """Run all checks. Raises GuaranteeBroken."""
        self._append_everywhere(producers, rng)
        first = self.dump()
        self.engine.kill_all("killed, to see whether a restart changes anything")
        self.engine.start()
        self._compare(first, self.dump(), "a restart")
        self._stop()
        self.engine.power_loss(rng.randrange(1 << 30))
        self.engine.start()
        self._compare(first, self.dump(), "an orderly stop and a power loss")
        self._stop()
        self._verify()

    def _append_everywhere(self, producers: list[Producer], rng: random.Random) -> None:
        """Append to each topic until it acknowledges records."""
        for _ in range(ROUNDS_MAX):
            missing = [name for name in sorted(self.configs) if not self._is_served(name)]
            if not missing:
                return
            for name in missing:
                producers[0].todo.append((name, 2, 30, rng))
                producers[2].todo.append((name, 1, 30, rng))
            self.rest("each topic settles records", lambda: all(each.is_idle for each in producers))
            self.engine.loop.run(self.engine.loop.now_ns + NS)
        raise GuaranteeBroken(f"topics {missing} accept no records after the last fault", missing[0])

    def _is_served(self, name: str) -> bool:
        """Return whether records of the topic's last life were acknowledged since the last fault.

        True if the topic does not exist.
        """
        life = self.model.living(name)
        return life is None or any(sent.acked_at > self.began for sent in life.sent)

    def _compare(self, before: dict[str, Any], after: dict[str, Any], what: str) -> None:
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                raise GuaranteeBroken(
                    f"{name}: {what} changes {_short(before.get(name), after.get(name))}", name
                )

    def _stop(self) -> None:
        done: list[bool] = []
        self.engine.stop(lambda: done.append(True))
        self.rest("an orderly stop ends", lambda: bool(done))

    # -- reading everything ---------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return the facts and records of each topic that clients see.

        Topics whose records expire are read and checked, but omitted.
        """
        found: dict[str, Any] = {}
        done: list[bool] = []
        for is_remote in (False, True):
            reader = _Whole(
                self.engine, self.model, f"examiner-{is_remote}", self.configs, random.Random(1),
                is_remote=is_remote,
            )  # fmt: skip
            done.clear()

            def look(reader: _Whole = reader) -> None:
                for name in sorted(self.configs):
                    seen = reader.whole(name)
                    if found.setdefault(name, seen) != seen and not self.configs[name].get("ttl_ms"):
                        raise GuaranteeBroken(
                            f"{name}: files and gateway differ: {_short(found[name], seen)}", name
                        )
                done.append(True)

            reader.process.spawn(look)
            self.rest("everything can be read", lambda: bool(done))
            self.engine.loop.kill(reader.process)
        return {name: seen for name, seen in found.items() if not self.configs[name].get("ttl_ms")}

    # -- offline verification -------------------------------------------------------------------------

    def _verify(self) -> None:
        """Run the offline verifier, which shares no decoder with the engine.

        It must find all topics and no damage.
        """
        with tempfile.TemporaryDirectory(prefix="world-") as work:
            for root in (DATA, COLD):
                Path(work + root).mkdir()
            write_files(self.engine.disk.contents(), Path(work))
            found = verify(work + DATA, work + COLD)
            heads = {topic.topic: topic.head for topic in found.topics}
            missing = {life.name for life in self.model.lives.values() if self._must_be(life)} - heads.keys()
            if missing:
                raise GuaranteeBroken(f"the offline verifier does not find topics {sorted(missing)}")

    def _must_be(self, life: Any) -> bool:
        return (life.topic_id, life.epoch) not in self.model.doomed


class _Whole(Reader):
    """Reads topics from the first to the last record."""

    def live(self) -> None:
        """Do nothing: this reader reads only on request."""

    def whole(self, name: str) -> Any:
        """Return (epoch, head, earliest, count, bytes, seqs) of a topic, or None if it does not exist.

        Raises GuaranteeBroken.
        """
        for _ in range(TRIES):
            try:
                return self._whole(name)
            except TopicNotFound:
                life = self.model.living(name)
                if life is not None:
                    raise GuaranteeBroken(f"{name}, epoch {life.epoch}, is not there", name) from None
                return None
            except RinglogError as e:
                last = e
                self.infos.clear()
                self.engine.loop.pause(0.25)
        raise GuaranteeBroken(f"{name} cannot be read: {last} {last.detail}", name)

    def _whole(self, name: str) -> Any:
        seen: list[int] = []
        epoch = after = 0
        for _ in range(PAGES_MAX):
            reply = self.read(name, epoch, after)
            seen += self.last_seen
            epoch, after = reply.epoch, reply.next_after
            if reply.caught_up:
                break
        else:
            raise GuaranteeBroken(f"{name}: no end after {PAGES_MAX} pages", name)
        info = self.resolve(name, fresh=True)
        state, _ = self.engine.ask(
            self.engine.child("wal_shard", info.shard), m.TopicState(name, touch=False)
        )
        assert isinstance(state, m.TopicStateReply), state
        if state.head_seq != reply.head_seq or state.epoch != epoch:
            raise NotReady("it changes while it is read")
        if state.count != len(seen) and not self.configs[name].get("ttl_ms"):
            raise GuaranteeBroken(f"{name}: count is {state.count}, {len(seen)} records were read", name)
        cap = self.configs[name].get("cap_records", 0)
        if cap and state.count > cap:
            raise GuaranteeBroken(f"{name}: {state.count} records, at most {cap}", name)
        return epoch, state.head_seq, state.earliest_seq, state.count, state.bytes, tuple(seen)


def _short(before: Any, after: Any) -> str:
    if not before or not after:
        return f"{before!r:.200} into {after!r:.200}"
    gone, new = set(before[-1]) - set(after[-1]), set(after[-1]) - set(before[-1])
    return f"{before[:-1]} into {after[:-1]}; gone {sorted(gone)[:20]}, new {sorted(new)[:20]}"


__all__ = ["Examiner"]
