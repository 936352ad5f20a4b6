"""`ringlog router`: routers by hand."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format
from ringlog.cli.places import tags_of
from ringlog.cli.topic import facts_of

Given = Annotated[Options, Parameter(parse=False)]
_LISTED = ("router", "source", "dest", "filter", "guarantee", "cursor", "lag", "forwarded_total")


def list_routers(prefix: str = "", *, source: str = "", dest: str = "", options: Given) -> None:
    """List routers, by name.

    Parameters
    ----------
    prefix
        Only names that begin like this.
    source
        Only those that forward this topic.
    dest
        Only those that forward to this topic.
    """
    with options.connect() as client:
        rows = [facts_of(each) for each in client.routers.list(prefix=prefix, source=source, dest=dest)]
    printer = options.printer()
    if printer.format is Format.TABLE:
        rows = [{name: row[name] for name in _LISTED} for row in rows]
    printer.rows(rows)


def create(
    router: str,
    source: str,
    dest: str,
    *,
    filter: str | None = None,
    levels: str | None = None,
    drop_node: Annotated[bool, Parameter(negative=())] = False,
    drop_tag: Annotated[bool, Parameter(negative=())] = False,
    no_create: Annotated[bool, Parameter(negative=())] = False,
    allow_cycle: Annotated[bool, Parameter(negative=())] = False,
    exactly_once: Annotated[bool, Parameter(negative=())] = False,
    options: Given,
) -> None:
    """Forward what is published to a topic from here on to another; the same router again changes how.

    Parameters
    ----------
    router
        Its name, by custom source->dest.
    source
        The topic to forward.
    dest
        Where to.
    filter
        A tag, or a prefix ending in *: only records that have such a tag.
    levels
        Only records whose tag matches by levels: + is any one, a final # all that follow (eu/+/orders).
    drop_node
        Copies have no node.
    drop_tag
        Copies have no tag.
    no_create
        The destination must exist.
    allow_cycle
        It may close a cycle; a record is then forwarded eight times at most.
    exactly_once
        Stamp copies with where they came from.
    """
    tags = tags_of(filter, levels, "--filter")
    with options.connect() as client:
        made = client.routers.create(
            router, source, dest, filter=tags, preserve_node=not drop_node, preserve_tag=not drop_tag,
            create_dest=not no_create, allow_cycle=allow_cycle,
            guarantee="exactly_once" if exactly_once else "at_least_once",
        )  # fmt: skip
    options.printer().thing(facts_of(made))


def show(router: str, *, settle: float = 0.0, options: Given) -> None:
    """Show what a router forwards and how far it is.

    Parameters
    ----------
    router
        Its name.
    settle
        Wait so many seconds at most until all that its source holds now was forwarded.
    """
    with options.connect() as client:
        found = client.routers.get(router, settle_s=settle)
    options.printer().thing(facts_of(found))


def delete(router: str, *, options: Given) -> int:
    """Forward no more. Copies that were made stay.

    Parameters
    ----------
    router
        Its name.
    """
    with options.connect() as client:
        deleted = client.routers.delete(router)
    options.printer().thing({"router": router, "deleted": deleted})
    return Exit.DONE if deleted else Exit.NOT_FOUND
