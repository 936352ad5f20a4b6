"""Scopes, prefixes, keys, key files and ZAP decisions, without sockets."""

import os

import pytest
from zmq.utils import z85

from ringlog.actors.gateway import auth
from ringlog.actors.gateway.permissions import SCOPES
from ringlog.actors.gateway.zap import answer
from ringlog.envelope import messages as m
from ringlog.errors import ConfigError, Forbidden, Unauthorized
from ringlog.link.curve import CurveKey, is_public_key, key_file_text, new_key, read_key_file

ANNE, BERT = new_key(), new_key()

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
    principal = auth.Principal("p", frozenset({scope}))
    if scope in allowed:
        auth.authorise(principal, message)
    else:
        with pytest.raises(Forbidden) as e:
            auth.authorise(principal, message)
        assert "required_scope" in e.value.detail


@pytest.mark.parametrize(("message", "_"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_name_outside_the_prefixes_is_forbidden_for_every_operation(message, _):
    """`TopicList` is allowed, because the gateway filters its reply."""
    principal = auth.Principal("p", SCOPES, ("b.", "a.tt"))
    if isinstance(message, m.TopicList):
        auth.authorise(principal, message)
        return
    with pytest.raises(Forbidden) as e:
        auth.authorise(principal, message)
    assert e.value.detail == {"topic": "a.t"}


def test_a_message_without_permissions_is_refused_to_every_principal():
    """The gateway denies by default. This includes the owner."""
    for message in (m.RingOpen("c", 1, 0), m.EngineStop(), m.Drain(), m.RingAttach("r", "b", "c")):
        with pytest.raises(Forbidden):
            auth.authorise(auth.OWNER, message)


def test_only_the_owner_receives_the_locations_of_log_files():
    auth.authorise(auth.OWNER, m.Locate("t", 0))
    with pytest.raises(Forbidden):
        auth.authorise(auth.Principal("p", SCOPES), m.Locate("t", 0))


def test_an_unknown_credential_is_refused_even_for_hello():
    """The error is `Unauthorized`."""
    with pytest.raises(Unauthorized):
        auth.authorise(None, m.Hello(1, "x"))


def _keys_text(*entries):
    return "\n".join(f"[[keys]]\n{entry}" for entry in entries)


def test_a_keys_file_maps_key_digests_to_principals():
    """The key ring stores digests and no public key. An entry without `scopes` has all scopes."""
    text = _keys_text(
        f'name = "anne"\npublic_key = "{ANNE.public.decode()}"\nscopes = ["read"]\nprefixes = ["a."]',
        f'name = "bert"\npublic_key = "{BERT.public.decode()}"',
    )
    ring = auth.parse_keys(text, "keys.toml")
    anne = ring.find(auth.key_id(ANNE.public.decode()))
    assert anne == auth.Principal("anne", frozenset({"read"}), ("a.",))
    assert ring.find(auth.key_id(BERT.public.decode())).scopes == SCOPES
    assert ring.find(ANNE.public.decode()) is None
    assert ring.find("") is None
    assert ANNE.public.decode() not in repr(vars(ring))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('name = "x"\npublic_key = "short"', "Z85"),
        ('name = ""\npublic_key = "{k}"', "name"),
        ('name = "x"\npublic_key = "{k}"\nscopes = ["root"]', "scopes"),
        ('name = "x"\npublic_key = "{k}"\nprefixes = []', "prefixes"),
        ('name = "x"\npublic_key = "{k}"\nprefixes = [""]', "prefixes"),
        ('name = "x"\npublic_key = "{k}"\ncolour = "red"', "colour"),
        ('name = "x"', "public_key"),
        ("name = ", "TOML"),
    ],
)
def test_an_invalid_entry_is_reported_without_its_key(entry, says):
    """The error names the invalid field and never quotes the key."""
    key = ANNE.public.decode()
    with pytest.raises(ConfigError) as e:
        auth.parse_keys(_keys_text(entry.replace("{k}", key)), "keys.toml")
    assert says in str(e.value)
    assert key not in str(e.value)


def test_one_key_under_two_names_is_refused():
    entry = f'name = "x"\npublic_key = "{ANNE.public.decode()}"'
    with pytest.raises(ConfigError, match="twice"):
        auth.parse_keys(_keys_text(entry, entry), "keys.toml")


def _zap(domain=b"ringlog.tcp", mechanism=b"CURVE", key=None):
    credentials = [z85.decode(key or ANNE.public)] if mechanism == b"CURVE" else []
    return [b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, *credentials]


def test_zap_admits_listed_curve_keys_to_the_tcp_domain_only():
    """ZAP requires exactly the TCP domain, exactly CURVE, and exactly a listed key."""
    ring = auth.KeyRing([(auth.key_id(ANNE.public.decode()), auth.Principal("anne", SCOPES))])
    good = answer(_zap(), ring)
    assert (good[2], good[4]) == (b"200", auth.key_id(ANNE.public.decode()).encode())
    for request in (
        _zap(key=BERT.public),
        _zap(domain=b""),
        _zap(domain=b"ringlog.ipc"),
        _zap(mechanism=b"NULL"),
        [*_zap(mechanism=b"NULL")[:5], b"PLAIN", b"user", b"pass"],
        [*_zap()[:6], b"short"],
    ):
        assert answer(request, ring)[2] == b"400"
    assert answer([b"2.0", *_zap()[1:]], ring) is None
    assert answer([b"1.0"], ring) is None


def test_zap_admits_ipc_peers_as_the_owner():
    """A process that can open the socket file owns the engine."""
    reply = answer(_zap(domain=b"ringlog.ipc", mechanism=b"NULL"), auth.KeyRing())
    assert (reply[2], reply[4]) == (b"200", b"local")


def _write(path, text, mode=0o600):
    path.write_text(text)
    os.chmod(path, mode)
    return str(path)


def test_a_key_file_can_be_read_back(tmp_path):
    path = _write(tmp_path / "server.key", key_file_text(ANNE))
    assert read_key_file(path, needs_secret=True) == ANNE
    public = _write(tmp_path / "server.pub", key_file_text(CurveKey(ANNE.public)), 0o644)
    assert read_key_file(public, needs_secret=False) == CurveKey(ANNE.public)
    assert ANNE.secret.decode() not in repr(ANNE)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (key_file_text(ANNE), 0o640, "accessible to other users"),
        (key_file_text(ANNE), 0o604, "accessible to other users"),
        (key_file_text(CurveKey(ANNE.public)), 0o600, "secret_key"),
        (key_file_text(CurveKey(BERT.public, ANNE.secret)), 0o600, "does not match"),
        ("secret_key = " + ANNE.secret.decode(), 0o600, "TOML"),
        ("x" * 5000, 0o600, "too large"),
    ],
    # Keys are random in every process, but the ids of tests must not change.
    ids=["readable-by-group", "readable-by-all", "public-only", "foreign-pair", "no-toml", "too-large"],
)
def test_a_bad_key_file_is_refused_without_quoting_it(tmp_path, text, mode, says):
    """Neither a wrong mode nor wrong content puts the secret key into the error."""
    path = _write(tmp_path / "k", text, mode)
    with pytest.raises(ConfigError) as e:
        read_key_file(path, needs_secret=True)
    assert says in str(e.value)
    assert ANNE.secret.decode() not in str(e.value)


def test_a_key_that_is_no_valid_z85_text_is_refused(tmp_path):
    """The text has 40 characters of the alphabet, but one group of five is a number above 32 bits."""
    secret = "a" * 35 + "#####"
    assert not is_public_key(secret)
    path = _write(tmp_path / "k", key_file_text(CurveKey(ANNE.public, secret.encode())))
    with pytest.raises(ConfigError, match="secret_key must be"):
        read_key_file(str(path), needs_secret=True)


def test_every_generated_key_is_valid():
    for _ in range(50):
        key = new_key()
        assert is_public_key(key.public.decode())
        assert is_public_key(key.secret.decode())


def test_a_key_file_that_is_a_symlink_or_missing_is_refused(tmp_path):
    """A directory is refused as well."""
    path = _write(tmp_path / "k", key_file_text(ANNE))
    os.symlink(path, tmp_path / "link")
    for wrong in (tmp_path / "link", tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError):
            read_key_file(str(wrong), needs_secret=True)
