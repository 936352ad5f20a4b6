"""Checks that need facts of the engine, and filters of replies."""

from __future__ import annotations

import pytest

from ringlog.access.engine_facts import (
    covered,
    covers_router,
    create_forbidden,
    group_forbidden,
    needs_admin_to_create,
    needs_group_admin,
    require_dead_letters,
    require_router,
    visible_prefixes,
    without_create,
    without_hidden_names,
)
from ringlog.access.keys import ANYONE, OWNER, Principal
from ringlog.access.permissions import SCOPES
from ringlog.envelope import messages as m
from ringlog.errors import Forbidden, RouterCycle, TopicIncompatible
from ringlog.leases.change import Mode

WRITER = Principal("writer", frozenset({"read", "write", "delete"}))
OF_A = Principal("of-a", SCOPES, ("a.",))


@pytest.mark.parametrize(
    ("create", "config", "needs"),
    [
        (None, {"durability": "fsync"}, True),
        (True, {"durability": "fsync"}, True),
        (False, {"durability": "fsync"}, False),
        (True, {}, False),
        (True, None, False),
    ],
)
def test_only_a_configuration_for_a_topic_that_may_be_new_needs_admin(create, config, needs) -> None:
    message = m.Append("a.t", 1, create=create, config=config)
    assert needs_admin_to_create(WRITER, message) is needs
    assert not needs_admin_to_create(OF_A, message)
    assert not needs_admin_to_create(WRITER, without_create(message))
    assert create_forbidden("a.t").detail == {"topic": "a.t", "required_scope": "admin"}


@pytest.mark.parametrize(
    ("router", "source", "dest", "is_covered"),
    [
        ("a.r", "a.s", "a.d", True),
        ("b.r", "a.s", "a.d", False),
        ("a.r", "b.s", "a.d", False),
        ("a.r", "a.s", "b.d", False),
    ],
)
def test_a_router_needs_all_three_names(router: str, source: str, dest: str, is_covered: bool) -> None:
    """The error names the router that the client named, and neither of its topics."""
    assert covers_router(OF_A, router, source, dest) is is_covered
    assert covers_router(WRITER, router, source, dest)
    if is_covered:
        require_router(OF_A, router, source, dest)
        return
    with pytest.raises(Forbidden) as refused:
        require_router(OF_A, router, source, dest)
    assert refused.value.detail == {"router": router}


def test_the_refusal_of_a_router_hides_names_that_the_key_does_not_cover() -> None:
    cycle = RouterCycle("closed", router="a.r", cycle=["a.1", "b.2"])
    assert without_hidden_names(WRITER, cycle).detail == {"router": "a.r", "cycle": ["a.1", "b.2"]}
    assert without_hidden_names(OF_A, cycle).detail == {"router": "a.r"}
    other = TopicIncompatible(
        "all routers into one destination must have the same source", reason="router_dest_fan_in",
        router="b.r", existing_source="b.s", dest="a.d",
    )  # fmt: skip
    assert without_hidden_names(OF_A, other).detail == {"reason": "router_dest_fan_in", "dest": "a.d"}


def test_a_redrive_needs_the_dead_letter_topic() -> None:
    for letters in ("", "a.dead"):
        require_dead_letters(OF_A, letters)
    require_dead_letters(WRITER, "b.dead")
    with pytest.raises(Forbidden):
        require_dead_letters(OF_A, "b.dead")


@pytest.mark.parametrize("retains", [True, False])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("principal", [WRITER, OF_A, OWNER, ANYONE], ids=lambda each: each.name)
def test_only_a_key_without_admin_and_a_retaining_queue_group_need_admin(
    principal: Principal, mode: Mode, retains: bool
) -> None:
    needs = needs_group_admin(principal, {"type": "log", "retain_until_acked": retains}, mode)
    assert needs == (principal is WRITER and mode == Mode.QUEUE and retains)
    assert not needs_group_admin(principal, {}, mode)


def test_the_error_about_a_group_names_scope_and_setting() -> None:
    for what in ("create", "move"):
        error = group_forbidden("t", what)
        assert what in error.message
        assert error.detail == {"topic": "t", "required_scope": "admin", "setting": "retain_until_acked"}


def test_names_outside_the_prefixes_are_removed_from_replies() -> None:
    assert covered(OF_A, ["b", "a.1", "a", "a.0"]) == ["a.1", "a.0"]
    assert covered(WRITER, ["b", "a"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("prefixes", "wanted", "visible"),
    [
        ((), "", [""]),
        ((), "a", ["a"]),
        (("a.",), "", ["a."]),
        (("a.",), "a", ["a."]),
        (("a.",), "a.x", ["a.x"]),
        (("a.",), "b", []),
        (("b", "a.", "a.x", "ab"), "a", ["a.", "ab"]),
        (("b", "a.", "a"), "", ["a", "b"]),
    ],
)
def test_a_list_covers_each_visible_name_once(prefixes, wanted, visible) -> None:
    assert visible_prefixes(Principal("p", SCOPES, prefixes), wanted) == visible
