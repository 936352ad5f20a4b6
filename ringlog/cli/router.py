"""`ringlog router`: list, create, show and delete routers."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.confirm import needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import tags_of
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format
from ringlog.cli.topic import facts_of

Given = Annotated[Options, Parameter(parse=False)]
_LISTED = ("router", "source", "dest", "filter", "guarantee", "cursor", "lag", "forwarded_total")


def list_routers(prefix: str = "", *, source: str = "", dest: str = "", options: Given) -> None:
    """List routers by name.

    Parameters
    ----------
    prefix
        List only routers whose name begins with this prefix.
    source
        List only routers with this source topic.
    dest
        List only routers with this destination topic.

    Examples
    --------
    ringlog router list
    ringlog router list --source orders
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
    """Create a router: forward new records of a topic to another topic.

    Creating the same router again changes its settings.

    Parameters
    ----------
    router
        Router name, by custom source->dest.
    source
        Source topic.
    dest
        Destination topic.
    filter
        Forward only records with this tag; a final * matches any ending.
    levels
        Forward only records whose tag matches by levels: + is one level, a final # all that follow
        (eu/+/orders).
    drop_node
        Remove the node from copies.
    drop_tag
        Remove the tag from copies.
    no_create
        Fail if the destination topic does not exist, instead of creating it.
    allow_cycle
        Allow the router to close a cycle; a record is then forwarded at most 8 times.
    exactly_once
        Store the source position in each copy, so that no record is copied twice.

    Examples
    --------
    ringlog router create orders-hot orders dispatch --filter 'urgent*'
    """
    tags = tags_of(filter, levels, "--filter")
    with options.connect() as client:
        made = client.routers.create(
            router, source, dest, filter=tags, preserve_node=not drop_node, preserve_tag=not drop_tag,
            create_dest=not no_create, allow_cycle=allow_cycle,
            guarantee="exactly_once" if exactly_once else "at_least_once",
        )  # fmt: skip
    options.printer().item(facts_of(made))


def show(router: str, *, settle: float = 0.0, options: Given) -> None:
    """Show the settings and the progress of a router.

    Parameters
    ----------
    router
        Router name.
    settle
        Maximum time in seconds to wait until all current records of the source are forwarded.

    Examples
    --------
    ringlog router show orders-hot
    ringlog router show orders-hot --settle 5
    """
    with options.connect() as client:
        found = client.routers.get(router, settle_s=settle)
    options.printer().item(facts_of(found))


def delete(
    router: str,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    options: Given,
) -> int:
    """Delete a router; existing copies stay.

    Parameters
    ----------
    router
        Router name.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog router delete orders-hot --yes
    """
    if needs_confirmation(yes=yes):
        require_confirmation(f"Delete router {router}?")
    with options.connect() as client:
        deleted = client.routers.delete(router)
    options.printer().item({"router": router, "deleted": deleted})
    return CliExit.DONE if deleted else CliExit.NOT_FOUND
