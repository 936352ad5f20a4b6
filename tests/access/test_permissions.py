"""The permission table is complete: for messages, fields with names, and settings that name topics."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringlog.access.keys import Principal, authorise
from ringlog.access.permissions import (
    OPEN_TO_ALL,
    OWNER_ONLY,
    PERMISSIONS,
    SCOPES,
    SETTINGS,
    LeaseOwner,
)
from ringlog.envelope import messages as m
from ringlog.envelope.messages import KINDS
from ringlog.errors import Forbidden, InvalidRequest
from ringlog.topic.config import TopicConfig

NO_OPERATION = frozenset(
    {
        # Between the engine's processes, or for clients with rings.
        "RingOpen", "RingClose", "RingAttach", "RingDetach", "OpenGrants", "OpenCalls", "AckAndClaim", "Feed",
        "EngineStatus", "EngineStop", "ListConsumers", "CheckpointNow", "ScrubNow", "CheckpointOpen",
        "ListLiveRecords", "SegmentsChange", "SegmentTier", "SegmentRef", "CheckpointRows", "CheckpointDone",
        "ColdRead", "RouterFacts", "RouterPut", "RouterDrop", "NotifyRouterChange", "ListShardRouters",
        "RouteRow", "Route", "ListExhausted", "ConfirmDeadLettered", "Redeliver", "FindSession",
        "ListSessions", "SessionsHeld", "SettledJobs", "JobsSettled",
        # Replies of the engine, and messages that it sends without a request.
        "ErrorReply", "Welcome", "Pong", "RingOpened", "RingClosed", "RingAttached", "RingDetached",
        "TopicInfo", "TopicStateReply", "TopicListReply", "TopicDeleted", "Appended", "ProducerStateReply",
        "Located", "ReadReply", "EngineStatusReply", "EngineStopping", "RecordsDeleted", "SeekTimeReply",
        "CheckpointPlan", "LiveRecordsReply", "SegmentsChanged", "CheckpointRowsReply", "CheckpointClosed",
        "ColdBytes", "CheckpointMade", "ScrubReport", "Subscribed", "Unsubscribed", "Grants",
        "SubscriptionsLost", "TopicsChanged", "GrantsOpened", "CallsOpened", "ConsumersReply", "RouterInfo",
        "RouterListReply", "RouterDeleted", "RouterDropped", "RouterChangeNotified", "ShardRoutersReply",
        "RoutesSettled", "RoutedRow", "Routed", "ClaimReply", "AckReply", "NotCombinable", "NackReply",
        "ExtendReply", "RejectReply", "PendingReply", "LeaseStatsReply", "ExhaustedReply", "ConfirmReply",
        "DeadLettersRedriven", "GroupInfo", "GroupLeft", "GroupListReply", "GroupTakenOver",
        "GroupCommitted", "GroupDeleted", "Redelivered", "FoundSession", "SessionsListed", "Noted",
    }
)  # fmt: skip
"""Maintained by hand: a new message kind is refused until it is added here or gets a row."""
NO_NAMES = frozenset(
    {
        "node", "group", "mode", "tags", "match", "filter", "reason", "guarantee", "idempotency_key",
    }
)  # fmt: skip
"""Fields with text that names neither a topic nor a router. A group belongs to its topic."""
KEY = "reached."
ROWS = sorted(PERMISSIONS, key=lambda key: (key[0].__name__, key[1] is LeaseOwner.GROUP))
IDS = [f"{kind.__name__}{'' if leases is None else '-' + leases.name}" for kind, leases in ROWS]


def test_every_message_has_a_permission_row_or_is_no_gateway_operation() -> None:
    rows = {kind.__name__ for kind, _ in PERMISSIONS}
    others = {kind.__name__ for kind in OPEN_TO_ALL | OWNER_ONLY}
    assert rows | others | NO_OPERATION == set(KINDS)
    assert len(rows) + len(others) + len(NO_OPERATION) == len(KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in NO_OPERATION])
def test_a_message_without_a_row_is_refused_to_every_key(kind: str) -> None:
    message: Any = KINDS[kind](**{field.name: None for field in msgspec.structs.fields(KINDS[kind])})
    for principal in (Principal("p", SCOPES), Principal("owner", SCOPES, is_owner=True)):
        with pytest.raises(Forbidden):
            authorise(principal, message)


def test_lease_requests_have_a_row_for_each_kind_of_owner() -> None:
    """A kind whose group may be empty has one row for a queue's own leases and one for a group's leases."""
    for kind, leases in PERMISSIONS:
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        assert ("group" in fields) == (leases is not None and kind is not m.GroupList), kind
        if "group" in fields and not fields["group"].required:
            assert {each for name, each in PERMISSIONS if name is kind} == {
                LeaseOwner.OWN,
                LeaseOwner.GROUP,
            }, kind


def _holds_text(hint: Any) -> bool:
    """Return whether a value of this type can contain a name."""
    if hint in {str, Any} or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        return True
    return any(_holds_text(part) for part in typing.get_args(hint) if part is not type(None))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_field_that_may_hold_a_name_is_in_its_row(row: Any) -> None:
    kind, _ = row
    hints = typing.get_type_hints(kind)
    texts = {field.name for field in msgspec.structs.fields(kind) if _holds_text(hints[field.name])}
    assert texts - NO_NAMES == {use.field for use in PERMISSIONS[row] if use.field}


def test_every_setting_that_names_a_topic_has_a_scope() -> None:
    found = set()
    for name in TopicConfig().to_dict():
        try:
            parsed = TopicConfig.parse({"type": "queue", name: "some.topic"})
        except InvalidRequest:
            continue
        assert parsed.to_dict()[name] == "some.topic"
        found.add(name)
    assert found == set(SETTINGS)


def _written(row: Any, name: str) -> m.Message:
    """Return a message that makes every use of its row, with `name` in every field that holds a name."""
    kind, leases = row
    texts = {"node": "w", "mode": 1 if kind is m.GroupOpen else "upsert"}
    given: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        if field.name in {use.field for use in PERMISSIONS[row]}:
            given[field.name] = name
        elif field.name in texts:
            given[field.name] = texts[field.name]
        elif field.required:
            given[field.name] = {int: 1, str: "g", bytes: b""}[hints[field.name]]
    if "config" in given:
        given["config"] = dict.fromkeys(SETTINGS, name)
    if "feeds" in given:
        given["feeds"] = [m.Feed(1, name, 1, 0, 0, 0)]
    if leases is LeaseOwner.OWN and "group" in hints:
        given["group"] = ""
    if leases is LeaseOwner.GROUP and "group" in hints:
        given["group"] = "g"
    return kind(**given)


def _named(message: m.Message, field: str, name: str) -> m.Message:
    given: Any = name
    if field == "config":
        given = dict.fromkeys(SETTINGS, name)
    elif field == "feeds":
        given = [m.Feed(1, f"{KEY}t", 1, 0, 0, 0), m.Feed(2, name, 1, 0, 0, 0)]
    return msgspec.structs.replace(message, **{field: given})


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_each_use_of_a_name_needs_its_scope_and_its_prefix(row: Any) -> None:
    """The whole table is checked."""
    message = _written(row, f"{KEY}t")
    uses = [use for use in PERMISSIONS[row] if use.when is None or use.when(message)]
    needed = {scope for use in uses for scope in use.scopes[:1]}
    authorise(Principal("p", frozenset(needed), (KEY,)), message)
    for use in uses:
        lacking = SCOPES - frozenset(use.scopes)
        with pytest.raises(Forbidden) as refused:
            authorise(Principal("p", lacking, (KEY,)), message)
        assert refused.value.detail["required_scope"] == " or ".join(use.scopes)
        if use.field and not use.is_filter:
            with pytest.raises(Forbidden) as refused:
                authorise(Principal("p", SCOPES, (KEY,)), _named(message, use.field, "other.t"))
            assert refused.value.detail == {"topic": "other.t"}
        elif use.field:
            authorise(Principal("p", SCOPES, (KEY,)), _named(message, use.field, "other.t"))


def test_creating_a_topic_without_configuration_needs_no_admin_scope() -> None:
    """The scope `write` is sufficient if nothing is configured."""
    for scope in ("write", "admin"):
        authorise(Principal("p", frozenset({scope})), m.TopicPut("t", {}, "create"))
    with pytest.raises(Forbidden):
        authorise(Principal("p", frozenset({"write"})), m.TopicPut("t", {}, "upsert"))


def test_an_ack_that_deletes_needs_more_than_read() -> None:
    reader = Principal("p", frozenset({"read"}))
    authorise(reader, m.Ack("t", "w", b"", group="g"))
    with pytest.raises(Forbidden):
        authorise(reader, m.Ack("t", "w", b""))


def _documented() -> dict[str, str]:
    """Return row name -> required scopes, as `docs/explanation/security.md` documents them."""
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "security.md").read_text()
    table = text.split("## What a key may do")[1].split("\n## ")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1].startswith("`"):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[1]), cells[2])
    return found


def test_the_security_page_documents_the_same_table() -> None:
    documented = _documented()
    assert set(documented) == {*IDS, *(kind.__name__ for kind in OPEN_TO_ALL | OWNER_ONLY)}
    for row, name in zip(ROWS, IDS, strict=True):
        for use in PERMISSIONS[row]:
            for scope in use.scopes:
                assert f"`{scope}`" in documented[name], (name, scope)
