"""`ringlog delete`: delete records of a topic."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.confirm import needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import within
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.topic import facts_of
from ringlog.errors import UsageError
from ringlog.limits import COUNT_MAX

Given = Annotated[Options, Parameter(parse=False)]


def delete(
    topic: str,
    *,
    before_seq: Annotated[int | None, Parameter(validator=within(1, COUNT_MAX))] = None,
    tag: str | None = None,
    prefix: str | None = None,
    levels: str | None = None,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    options: Given,
) -> int:
    """Delete records of a topic. This cannot be undone.

    With --before-seq and a tag, a record must satisfy both.

    Parameters
    ----------
    topic
        Topic name.
    before_seq
        Delete records with a number below this one.
    tag
        Delete records with exactly this tag.
    prefix
        Delete records whose tag begins with this prefix.
    levels
        Delete records whose tag matches by levels: + is one level, a final # all that follow (eu/+/orders).
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog delete orders --before-seq 1000 --yes
    ringlog delete orders --tag test --yes
    """
    if sum(each is not None for each in (tag, prefix, levels)) > 1:
        raise UsageError("give one of --tag, --prefix and --levels: they exclude one another")
    if before_seq is None and tag is None and prefix is None and levels is None:
        raise UsageError("say what to delete: give --before-seq, --tag, --prefix or --levels", topic=topic)
    match: list[str] | None = None
    if tag is not None:
        match = ["tag", "Eq", tag]
    elif prefix is not None:
        match = ["tag", "Glob", f"{prefix}*"]
    elif levels is not None:
        match = ["tag", "Levels", levels]
    if needs_confirmation(yes=yes):
        require_confirmation(_question(topic, before_seq, tag, prefix, levels))
    with options.connect() as client:
        done = client.topics.delete_records(topic, before_seq=before_seq or 0, match=match)
    options.printer().item(facts_of(done))
    return CliExit.DONE


def _question(
    topic: str, before_seq: int | None, tag: str | None, prefix: str | None, levels: str | None
) -> str:
    what = [f"below {before_seq}"] if before_seq is not None else []
    what += [f"tagged {tag!r}"] if tag is not None else []
    what += [f"with tags that begin with {prefix!r}"] if prefix is not None else []
    what += [f"with tags that match {levels!r}"] if levels is not None else []
    return f"Delete the records of topic {topic} {' and '.join(what)}?"
