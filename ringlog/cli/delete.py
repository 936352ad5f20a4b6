"""`ringlog delete`: records, for good."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.asking import is_confirmed
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.topic import facts_of
from ringlog.errors import UsageError

Given = Annotated[Options, Parameter(parse=False)]


def delete(
    topic: str,
    *,
    before_seq: int | None = None,
    tag: str | None = None,
    prefix: str | None = None,
    levels: str | None = None,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    options: Given,
) -> int:
    """Delete records of a topic. There is no way back.

    With --before-seq and a tag a record must satisfy both. On a terminal it asks first.

    Parameters
    ----------
    topic
        Which one.
    before_seq
        Records with a number below this one.
    tag
        Records with exactly this tag.
    prefix
        Records whose tag begins like this.
    levels
        Records whose tag matches by levels: + is any one, a final # all that follow (eu/+/orders).
    yes
        Do not ask.
    """
    if sum(each is not None for each in (tag, prefix, levels)) > 1:
        raise UsageError("--tag, --prefix and --levels exclude one another")
    if before_seq is None and tag is None and prefix is None and levels is None:
        raise UsageError("say what to delete: --before-seq, --tag, --prefix or --levels", topic=topic)
    if before_seq is not None and before_seq < 1:
        raise UsageError("--before-seq is at least 1", found=before_seq)
    match: list[str] | None = None
    if tag is not None:
        match = ["tag", "Eq", tag]
    elif prefix is not None:
        match = ["tag", "Glob", f"{prefix}*"]
    elif levels is not None:
        match = ["tag", "Levels", levels]
    if not yes and not is_confirmed(_question(topic, before_seq, tag, prefix, levels)):
        return Exit.USAGE
    with options.connect() as client:
        done = client.topics.delete_records(topic, before_seq=before_seq or 0, match=match)
    options.printer().thing(facts_of(done))
    return Exit.DONE


def _question(
    topic: str, before_seq: int | None, tag: str | None, prefix: str | None, levels: str | None
) -> str:
    what = [f"below {before_seq}"] if before_seq is not None else []
    what += [f"tagged {tag!r}"] if tag is not None else []
    what += [f"with tags that begin with {prefix!r}"] if prefix is not None else []
    what += [f"with tags that match {levels!r}"] if levels is not None else []
    return f"Delete records of {topic} {' and '.join(what)} for good?"
