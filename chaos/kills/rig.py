"""The engine of class `kills`: it starts with a plan of stop points and is checked closely when it stops."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos import leaks
from ringlog.drill.engine import SETTINGS, DrillEngine
from ringlog.drill.load import Load
from ringlog.environment import STOP_POINTS
from ringlog.placement import home_shard
from ringlog.verify.directory import verify_directory


class Engine(DrillEngine):
    """A drill's engine that can arm stop points for its next start."""

    code_first: tuple[str, ...] = ()
    """Directories that come before ringlog on the path of every process. Tests plant bugs with them."""

    def __init__(self, root: Path, settings: Mapping[str, Any] = SETTINGS, plan: str = "") -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
        environ["PYTHONPATH"] = os.pathsep.join([*self.code_first, str(Path(__file__).parent.parent.parent)])
        if leaks.MARK in os.environ:
            environ[leaks.MARK] = os.environ[leaks.MARK]
        if plan:
            environ[STOP_POINTS] = plan
        super().__init__(root, settings, environ)

    def arm(self, plan: str) -> None:
        """Set the stop points of later starts; "" for none."""
        self._environ = {**self._environ, STOP_POINTS: plan}


def on_shard(prefix: str, shard: int, shards: int) -> str:
    """Return a topic name whose home is this shard."""
    return next(name for n in range(10_000) if home_shard(name := f"{prefix}-{n}", shards) == shard)


def check_topics(engine: DrillEngine, load: Load, complaints: list[str]) -> None:
    """Check that the offline verifier and the final read count the same records.

    Call it after `verdict` and the orderly stop.
    """
    found = {
        topic.topic: topic
        for topic in verify_directory(engine.data_dir, jobs=1, cold_dir=str(engine.cold_dir)).topics
    }
    for fact in load.facts:
        topic = found.get(fact.topic)
        if topic is None or (topic.records, topic.head) != (fact.counted, fact.head):
            said = topic and (topic.records, topic.head)
            complaints.append(f"verify counts {said} in {fact.topic}, readers {(fact.counted, fact.head)}")
