"""Scopes and prefixes of a principal, for each operation."""

import pytest

from ringlog.access.keys import ANYONE, OWNER, Principal, authorise
from ringlog.access.permissions import SCOPES
from ringlog.envelope import messages as m
from ringlog.errors import Forbidden, Unauthorized

OPERATIONS = {
    "Read": (m.Read("a.t", 0), {"read"}),
    "TopicState": (m.TopicState("a.t"), {"read"}),
    "TopicList": (m.TopicList("a."), {"read"}),
    "TopicResolve": (m.TopicResolve("a.t"), {"read", "write"}),
    "Append": (m.Append("a.t", 1), {"write"}),
    "ProducerState": (m.ProducerState("a.t", 7), {"write"}),
    "TopicDelete": (m.TopicDelete("a.t"), {"delete"}),
    "TopicPut": (m.TopicPut("a.t", {"durability": "fsync"}), {"admin"}),
    "TopicPut by a writer": (m.TopicPut("a.t", {}, "create"), {"write", "admin"}),
}


@pytest.mark.parametrize("scope", sorted(SCOPES))
@pytest.mark.parametrize(("message", "allowed"), OPERATIONS.values(), ids=OPERATIONS)
def test_each_operation_passes_with_its_scope_and_no_other(message, allowed, scope):
    """A refusal names the required scope."""
    principal = Principal("p", frozenset({scope}))
    if scope in allowed:
        authorise(principal, message)
    else:
        with pytest.raises(Forbidden) as e:
            authorise(principal, message)
        assert "required_scope" in e.value.detail


@pytest.mark.parametrize(("message", "_"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_name_outside_the_prefixes_is_forbidden_for_every_operation(message, _):
    """`TopicList` is allowed, because the gateway filters its reply."""
    principal = Principal("p", SCOPES, ("b.", "a.tt"))
    if isinstance(message, m.TopicList):
        authorise(principal, message)
        return
    with pytest.raises(Forbidden) as e:
        authorise(principal, message)
    assert e.value.detail == {"topic": "a.t"}


def test_a_message_without_permissions_is_refused_to_every_principal():
    """The gateway denies by default. This includes the owner."""
    for message in (m.RingOpen("c", 1, 0), m.EngineStop(), m.RingAttach("r", "b", "c")):
        with pytest.raises(Forbidden):
            authorise(OWNER, message)


def test_only_the_owner_receives_the_locations_of_log_files():
    authorise(OWNER, m.Locate("t", 0))
    with pytest.raises(Forbidden):
        authorise(Principal("p", SCOPES), m.Locate("t", 0))


def test_an_unknown_credential_is_refused_even_for_hello():
    """The error is `Unauthorized`."""
    with pytest.raises(Unauthorized):
        authorise(None, m.Hello(1, "x"))


@pytest.mark.parametrize(
    ("scopes", "prefixes", "is_unrestricted"),
    [
        (SCOPES, (), True),
        (SCOPES, ("a.",), False),
        (SCOPES - {"admin"}, (), False),
        (frozenset(), (), False),
    ],
)
def test_a_principal_is_unrestricted_with_all_scopes_and_every_name(scopes, prefixes, is_unrestricted):
    assert Principal("p", scopes, prefixes).is_unrestricted is is_unrestricted


def test_an_unrestricted_principal_is_refused_what_no_key_may_do():
    """The fast path applies to messages with a row in the table only."""
    for message in (m.RingOpen("c", 1, 0), m.Locate("t", 0)):
        for each in (ANYONE, Principal("p", SCOPES)):
            assert each.is_unrestricted
            with pytest.raises(Forbidden):
                authorise(each, message)
