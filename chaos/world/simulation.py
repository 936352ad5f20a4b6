"""Runs one seed: creates a world, executes its steps, waits until all is served, and checks everything."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from chaos.rigs.storage import drawn_salts
from chaos.world import actors, gateway, shards
from chaos.world.clients import Admin, Producer
from chaos.world.disks import FAULTS, Armed
from chaos.world.engine import Child, Engine
from chaos.world.examine import Examiner
from chaos.world.model import Model
from chaos.world.plan import FAULTS as FAULT_STEPS
from chaos.world.plan import Failed, Step, options_of, steps_of
from chaos.world.readers import Reader
from chaos.world.tasks import NS, Loop, Process
from ringlog.drill.checks import GuaranteeBroken
from ringlog.storage import recovery

REST_S = 90.0
"""Limit of the virtual time (s) from the last fault until everything is served again."""
KINDS = ("wal_shard", "wal_shard", "wal_shard", "gateway", "compactor", "compactor", "reclaimer", "relocator")
EVERYTHING = frozenset({"append", "delete by tag", "drop", "seal", "rewrite", "relocate"})
TOPIC_EVENTS = 60
LAST_EVENTS = 30


@contextmanager
def read_buffers_of(seed: int) -> Iterator[None]:
    """Read logs in buffers of one of three sizes: what belongs together may be on both sides of an end."""
    settings, name = vars(recovery), "RECOVERY_READ_BYTES"
    usual = settings[name]
    settings[name] = random.Random(f"read buffers {seed}").choice((4 << 10, 64 << 10, usual))
    try:
        yield
    finally:
        settings[name] = usual


class Simulation:
    """One seed. It executes steps from `first`, before `upto`, and not in `without`."""

    def __init__(
        self, seed: int, *, first: int = 0, upto: int = 1 << 30, without: Collection[int] = ()
    ) -> None:
        self.seed = seed
        self.options: dict[str, Any] = options_of(seed)
        self.rng = random.Random(f"world {seed}")
        self.loop = Loop(random.Random(f"loop {seed}"))
        self.began_ns = self.loop.now_ns
        self.loop.switching = self.options["switching"]
        self.model = Model(self.loop.now_us)
        self.steps = [
            step for step in steps_of(seed) if first <= step.index < upto and step.index not in without
        ]
        self.kinds: Counter[str] = Counter()
        self.fuses: list[tuple[str, int, Callable[[], None]]] = []
        self.engine = Engine(self.loop, self.rng, self.model, self.options)
        self.engine.base.effect_observer = lambda shard, effect: shards.watch(self.engine, shard, effect)
        self.engine.makers = {
            "wal_shard": shards.wal_shard, "gateway": gateway.gateway, "compactor": actors.compactor,
            "reclaimer": actors.reclaimer, "relocator": actors.relocator,
        }  # fmt: skip
        self.engine.arm = self._arm  # type: ignore[method-assign]
        topics = self.options["topics"]
        self.producers = [
            Producer(self.engine, self.model, "local-1", topics, 11, is_remote=False),
            Producer(self.engine, self.model, "local-2", topics, 1 << 63 | 12, is_remote=False),
            Producer(self.engine, self.model, "remote", topics, 13, is_remote=True),
        ]
        self.admin = Admin(self.engine, self.model, "admin", topics)
        reading = random.Random(f"reading {seed}")
        self.readers = [
            Reader(self.engine, self.model, "reader-remote", topics, reading, is_remote=True),
            Reader(self.engine, self.model, "reader-local", topics, reading, is_remote=False),
        ]

    # -- the run --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Failed."""
        gc.disable()
        gc.freeze()  # objects that outlive the seed are not scanned by later collections
        try:
            salts = random.Random(f"salts {self.seed}")
            with drawn_salts(salts.getrandbits), actors.listening(self.engine), read_buffers_of(self.seed):
                self._live()
        except Exception as e:
            raise Failed(f"{type(e).__name__}: {e}", self.story(getattr(e, "topic", ""))) from e
        finally:
            self.close()
            gc.unfreeze()
            gc.enable()

    def _live(self) -> None:
        self.engine.start()
        for name in self.options["topics"]:
            self.admin.todo.append(("put", name, random.Random(name)))
        for step in self.steps:
            self.loop.at(step.at_s, partial(self._do, step))
        last = self.steps[-1].at_s if self.steps else 0.0
        self.loop.run(NS + round((last + 0.2) * NS))
        self._calm_down()
        examiner = Examiner(self.engine, self.model, self.options["topics"], self.rest)
        self.rest("every client is served again", self._is_served)
        for name in self.options["topics"]:
            self.admin.todo.append(("put", name, random.Random(name)))
        self.rest("every topic is there", self._is_served)
        for reader in self.readers:
            reader.is_stopping = True
        examiner.run_all_checks(self.producers, random.Random(f"last {self.seed}"))

    def _is_served(self) -> bool:
        return self.engine.is_up and self.admin.is_idle and all(each.is_idle for each in self.producers)

    def rest(self, what: str, is_done: Callable[[], bool], seconds: float = REST_S) -> None:
        """Run the world until `is_done` returns true.

        Raises GuaranteeBroken after `seconds` of virtual time.
        """
        until_ns = self.loop.now_ns + round(seconds * NS)
        self.loop.run(until_ns, is_done)
        if not is_done():
            raise GuaranteeBroken(
                f"condition not reached within {seconds:.0f} s after the last fault: {what}"
            )

    def _calm_down(self) -> None:
        engine = self.engine
        engine.disk_faults.calm()
        self.fuses.clear()
        for child in engine.children.values():
            if child.process is not None:
                child.process.fuse = child.process.paused_until_ns = 0
        for process in (each.process for each in (*self.producers, self.admin, *self.readers)):
            process.paused_until_ns = 0
        engine.is_calm = True
        self.loop.at(0.5, self._start_if_down)
        engine.tell("", "all is calm")

    def _start_if_down(self) -> None:
        engine = self.engine
        if not engine.is_up:
            engine.start()
        elif not engine.is_stopping and any(run.core.directory.halted for run in engine.base.runs.values()):
            # A restart reads files that an earlier start could not read; the error states this remedy.
            engine.stop(lambda: self.loop.at(0.05, engine.start))
        if not self._is_served():
            self.loop.at(1.0, self._start_if_down)

    def close(self) -> None:
        """Unwind every task."""
        self.engine.kill_all("the end")
        for client in (*self.producers, self.admin, *self.readers):
            self.loop.kill(client.process)

    # -- work done ------------------------------------------------------------------------------------

    def facts(self) -> Counter[str]:
        """Return all counts."""
        return self.engine.counts + self.model.counts + self.engine.disk_faults.met + self.kinds

    def kinds_of_faults(self) -> int:
        """Return the number of kinds of faults in this seed."""
        return sum(self.kinds[kind] > 0 for kind in FAULT_STEPS)

    def topics_with_everything(self) -> list[str]:
        """Return the topics that had all of EVERYTHING in this seed.

        These are an append, a delete by tag, a deletion of the topic, and the seal, rewrite and move of
        segments.
        """
        had: dict[str, set[str]] = {}
        made = self.engine.disk_faults.made
        for life in self.model.lives.values():
            mine = had.setdefault(life.name, set())
            mine |= life.had | made.get(life.topic_id, set()) | ({"append"} if life.at else set())
        return [name for name, mine in had.items() if mine >= EVERYTHING]

    # -- steps ----------------------------------------------------------------------------------------

    def _do(self, step: Step) -> None:
        self.kinds[step.kind] += 1
        if step.kind not in {"append", "put", "delete", "drop", "configure"}:
            self.engine.tell("", f"step {step.index}: {step.kind}")
        getattr(self, f"_{step.kind}")(step.random())

    def _topic(self, rng: random.Random) -> str:
        found: str = rng.choice(sorted(self.options["topics"]))
        return found

    def _append(self, rng: random.Random) -> None:
        producer = rng.choice(self.producers)
        size = rng.choice((20, self.options["record_bytes"]))
        producer.todo.append((self._topic(rng), rng.choice((1, 2, 5, 12)), size, rng))
        producer.news.set()

    def _put(self, rng: random.Random) -> None:
        self.admin.todo.append(("put", self._topic(rng), rng))

    def _configure(self, rng: random.Random) -> None:
        self.admin.todo.append(("configure", self._topic(rng), rng))

    def _delete(self, rng: random.Random) -> None:
        self.admin.todo.append(("delete", self._topic(rng), rng))

    def _drop(self, rng: random.Random) -> None:
        topic = self._topic(rng)
        self.admin.todo.append(("drop", topic, rng))
        if rng.random() < 0.8:
            self.admin.todo.append(("put", topic, rng))

    def _checkpoint(self, rng: random.Random) -> None:
        child = self.engine.child("compactor")
        if child is not None:
            child.actor.want()

    def _pick(self, rng: random.Random) -> Child | None:
        kind = rng.choice(KINDS)
        found = [child for child in self.engine.children.values() if child.spec.kind == kind]
        return rng.choice(found) if found else None

    def _kill(self, rng: random.Random) -> None:
        """Kill a process now or at one of its next effects or disk calls.

        Perhaps also kill its successor early.
        """
        child = self._pick(rng)
        if child is None:
            return
        self._burn(child, rng, lambda: self.engine.kill_child(child, "killed"))
        if rng.random() < 0.3:
            self.fuses.append(
                (child.spec.name, rng.randrange(1, 60), lambda: self.engine.kill_child(child, "killed early"))
            )

    def _burn(self, child: Child, rng: random.Random, act: Callable[[], None]) -> None:
        process = child.process
        if process is None or rng.random() < 0.2:
            act()
        else:
            process.fuse, process.at_fuse = rng.choice((1, 3, 10, 30)) + rng.randrange(10), act

    def _arm(self, process: Process) -> None:
        """Apply a pending fault to a new process."""
        for fuse in self.fuses:
            if fuse[0] == process.name:
                self.fuses.remove(fuse)
                process.fuse, process.at_fuse = fuse[1], fuse[2]
                return

    def _kill_all(self, rng: random.Random) -> None:
        self._end(rng, lambda: self.engine.kill_all("everything is killed"))

    def _kill_supervisor(self, rng: random.Random) -> None:
        self._end(rng, lambda: self.engine.kill_all("supervisor killed, and its children with it"))

    def _power(self, rng: random.Random) -> None:
        seed = rng.randrange(1 << 30)
        self._end(rng, lambda: self.engine.power_loss(seed))

    def _end(self, rng: random.Random, act: Callable[[], None]) -> None:
        """End the engine now, or at an effect of some process; start it again later."""
        shards_then = self._next_shards(rng)
        pause_s, again = rng.uniform(0.01, 0.4), rng.random() < 0.25
        seed = rng.randrange(1 << 30)

        def end() -> None:
            act()
            self.loop.at(pause_s, lambda: self.engine.start(shards_then))
            if again:  # once more, during recovery
                self.loop.at(pause_s + 0.02 + pause_s / 3, lambda: self._end_again(seed, shards_then))

        child = self._pick(rng)
        if child is None:
            end()
        else:
            self._burn(child, rng, end)

    def _end_again(self, seed: int, shards_then: int) -> None:
        if seed % 2:
            self.engine.power_loss(seed)
        else:
            self.engine.kill_all("everything is killed while it starts")
        self.loop.at(0.1, lambda: self.engine.start(shards_then))

    def _next_shards(self, rng: random.Random) -> int:
        changes = self.options["reshards"] and rng.random() < 0.6
        return rng.choice((1, 2, 3)) if changes else self.engine.base.shards

    def _restart(self, rng: random.Random) -> None:
        """Stop the engine in order and start it again. Perhaps a shard cannot sync what it writes last."""
        shards_then = self._next_shards(rng)
        if rng.random() < 0.5:
            self.engine.disk_faults.armed.append(Armed("data_sync", "EIO", "wal_shard", rng.choice((1, 2))))
        self.engine.stop(lambda: self.loop.at(0.05, lambda: self.engine.start(shards_then)))

    def _disk(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 4)):
            op, kind = rng.choice(FAULTS)
            armed = Armed(op, kind, rng.choice(KINDS), rng.choice((1, 1, 2, 5, 15)))
            self.engine.disk_faults.armed.append(armed)

    def _slow(self, rng: random.Random) -> None:
        disk_faults = self.engine.disk_faults
        disk_faults.slow_until_ns = self.loop.now_ns + round(rng.uniform(0.1, 2) * NS)
        disk_faults.slowness_s = rng.choice((0.005, 0.05, 0.4))

    def _pause(self, rng: random.Random) -> None:
        child = self._pick(rng)
        if child is not None and child.process is not None:
            child.process.paused_until_ns = self.loop.now_ns + round(rng.uniform(0.05, 3) * NS)

    def _clock(self, rng: random.Random) -> None:
        by_s = rng.choice((-3_600.0, -5.0, -0.5, 0.5, 5.0, 3_600.0))
        self.model.now()
        self.loop.step_wall(by_s)
        self.model.stepped()
        self.engine.tell("", f"wall clock stepped by {by_s} s")

    def _full(self, rng: random.Random) -> None:
        """Make the disk full for a random time."""
        disk_faults = self.engine.disk_faults
        disk_faults.is_full = True

        def room() -> None:
            disk_faults.is_full = False

        self.loop.at(rng.uniform(0.1, 1.5), room)

    def _client(self, rng: random.Random) -> None:
        self.engine.counts["client deaths"] += 1
        rng.choice(self.producers).restart()

    # -- report ---------------------------------------------------------------------------------------

    def story(self, topic: str) -> str:
        """Return the last events about a topic, and the last events of all."""
        events = list(self.engine.story)
        about = [event for event in events if event[1] == topic or not event[1]][-TOPIC_EVENTS:]
        lines = [f"{at / NS:10.6f} {name or '-':2} {what}" for at, name, what in about]
        lines.append("last of all:")
        lines += [f"{at / NS:10.6f} {name or '-':2} {what}" for at, name, what in events[-LAST_EVENTS:]]
        return "\n".join(lines)


__all__ = ["Failed", "Simulation"]
