"""Compares an engine's answers from a damaged directory with its answers from the undamaged one."""

from __future__ import annotations

from chaos.rot.answers import Answers, Topic
from chaos.rot.specimen import COLD
from ringlog.errors import CorruptData, RinglogError, StartRefused, TopicHalted
from ringlog.segment.layout import DATA as DATA_SUFFIX


def compare(truth: Answers, found: Answers, damaged: set[str]) -> str:
    """Describe the problem in the answers if these files are damaged, or return an empty string.

    An answer is right if it is unchanged, or an error that names a damaged file, or an announced loss. Other
    answers must not differ, and data in other files must still be there.
    """
    if found.refused is not None:
        return _unfounded(found.refused, damaged)
    announced = {entry[0] for entry in found.announced} - {entry[0] for entry in truth.announced}
    for name, sound in truth.topics.items():
        wrong = _wrong_topic(name, sound, found.topics[name], damaged, is_announced=name in announced)
        if wrong:
            return wrong
    strangers = sorted(set(found.topics) - set(truth.topics))
    return f"unknown topics: {strangers}" if strangers else ""


def _unfounded(error: RinglogError, damaged: set[str]) -> str:
    text = f"{error} {error.detail}"
    names = {path.rpartition("/")[2].rpartition(".")[0] or path for path in damaged}
    names |= {path.rpartition("/")[2] for path in damaged} | {str(_file_id(path)) for path in damaged}
    is_told = isinstance(error, CorruptData | StartRefused | TopicHalted) and any(
        name and name in text for name in names
    )
    return "" if is_told else f"refused without naming the damaged file: {type(error).__name__}: {text}"[:600]


def _file_id(path: str) -> int:
    """Return the number of a log file from its name; 0 for other files."""
    if not path.endswith(".log"):
        return 0
    incarnation, n = path.removesuffix(".log").split("-")[-2:]
    return int(incarnation) << 24 | int(n)


def _wrong_topic(name: str, sound: Topic, found: Topic, damaged: set[str], *, is_announced: bool) -> str:
    if found.error:
        # This error is acceptable if the only copy is missing from its place. No data was invented. A data
        # part that is missing on the host may have been moved to the cold tier since the snapshot.
        is_absent = "cold_unavailable" in found.error and any(
            path.startswith(COLD) or path.endswith(DATA_SUFFIX) for path in damaged
        )
        return "" if is_absent else f"topic {name}: {found.error}"
    if found.damage is not None:
        wrong = _unfounded(found.damage, damaged)
        if not wrong and found.records != sound.records[: len(found.records)]:
            wrong = "records before the damage differ"
        return wrong and f"topic {name}: {wrong}"
    if found.state == sound.state and found.records == sound.records:
        return ""
    if is_announced and set(found.records) <= set(sound.records):
        return ""
    gone = sorted(set(sound.records) - set(found.records))
    return (
        f"topic {name}: {len(found.records)} records of {len(sound.records)} and no word about it; gone are"
        f" {[each[0] for each in gone][:8]}; state {found.state[:7]} was {sound.state[:7]}"
    )
