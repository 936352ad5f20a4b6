"""Scopes, prefixes, keys, key files and the ZAP decision; no socket yet."""

import os

import pytest
from zmq.utils import z85

from actors.gateway import auth
from actors.gateway.permissions import SCOPES
from actors.gateway.zap import answer
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
    """A-8, SEC-5."""
    principal = auth.Principal("p", frozenset({scope}))
    if scope in allowed:
        auth.authorise(principal, message)
    else:
        with pytest.raises(Forbidden) as e:
            auth.authorise(principal, message)
        assert "required_scope" in e.value.detail


@pytest.mark.parametrize(("message", "_"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_name_outside_the_prefixes_is_forbidden_for_every_operation(message, _):
    """A-9; the list is filtered instead (A-11)."""
    principal = auth.Principal("p", SCOPES, ("b.", "a.tt"))
    if isinstance(message, m.TopicList):
        auth.authorise(principal, message)
        return
    with pytest.raises(Forbidden) as e:
        auth.authorise(principal, message)
    assert e.value.detail == {"topic": "a.t"}


def test_what_is_not_listed_is_refused_to_everybody():
    """SEC-5: deny by default, the owner included."""
    for message in (m.RingOpen("c", 1, 0), m.EngineStop(), m.Drain(), m.RingAttach("r", "b", "c")):
        with pytest.raises(Forbidden):
            auth.authorise(auth.OWNER, message)


def test_where_the_files_lie_is_told_to_the_owner_only():
    auth.authorise(auth.OWNER, m.Locate("t", 0))
    with pytest.raises(Forbidden):
        auth.authorise(auth.Principal("p", SCOPES), m.Locate("t", 0))


def test_an_unknown_credential_may_not_even_say_hello():
    """A-12, A-13."""
    with pytest.raises(Unauthorized):
        auth.authorise(None, m.Hello(1, "x"))


def _keys_text(*entries):
    return "\n".join(f"[[keys]]\n{entry}" for entry in entries)


def test_a_keys_file_gives_principals_by_digest():
    """A-2, A-3, A-7."""
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
def test_a_wrong_entry_is_named_without_its_key(entry, says):
    """A-4, SEC-29."""
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
    """SEC-2, SEC-3: exactly our domain, exactly our mechanism, exactly the listed keys."""
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


def test_zap_admits_the_ipc_socket_as_the_owner():
    """A-16: whoever can open the socket owns the engine."""
    reply = answer(_zap(domain=b"ringlog.ipc", mechanism=b"NULL"), auth.KeyRing())
    assert (reply[2], reply[4]) == (b"200", b"local")


def _write(path, text, mode=0o600):
    path.write_text(text)
    os.chmod(path, mode)
    return str(path)


def test_a_key_file_goes_round(tmp_path):
    path = _write(tmp_path / "server.key", key_file_text(ANNE))
    assert read_key_file(path, needs_secret=True) == ANNE
    public = _write(tmp_path / "server.pub", key_file_text(CurveKey(ANNE.public)), 0o644)
    assert read_key_file(public, needs_secret=False) == CurveKey(ANNE.public)
    assert ANNE.secret.decode() not in repr(ANNE)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (key_file_text(ANNE), 0o640, "open to others"),
        (key_file_text(ANNE), 0o604, "open to others"),
        (key_file_text(CurveKey(ANNE.public)), 0o600, "secret_key"),
        (key_file_text(CurveKey(BERT.public, ANNE.secret)), 0o600, "belong together"),
        ("secret_key = " + ANNE.secret.decode(), 0o600, "TOML"),
        ("x" * 5000, 0o600, "too large"),
    ],
    # Keys are drawn anew by every process; names of tests must not be.
    ids=["readable-by-group", "readable-by-all", "public-only", "foreign-pair", "no-toml", "too-large"],
)
def test_a_bad_key_file_is_refused_without_quoting_it(tmp_path, text, mode, says):
    """SEC-28, SEC-29."""
    path = _write(tmp_path / "k", text, mode)
    with pytest.raises(ConfigError) as e:
        read_key_file(path, needs_secret=True)
    assert says in str(e.value)
    assert ANNE.secret.decode() not in str(e.value)


def test_a_key_that_is_no_number_is_refused(tmp_path):
    """Forty characters of the alphabet, but five of them are a number beyond 32 bits."""
    secret = "a" * 35 + "#####"
    assert not is_public_key(secret)
    path = _write(tmp_path / "k", key_file_text(CurveKey(ANNE.public, secret.encode())))
    with pytest.raises(ConfigError, match="secret_key is not"):
        read_key_file(str(path), needs_secret=True)


def test_every_key_that_is_made_is_one():
    for _ in range(50):
        key = new_key()
        assert is_public_key(key.public.decode())
        assert is_public_key(key.secret.decode())


def test_a_key_file_that_is_a_link_or_absent_is_refused(tmp_path):
    """SEC-24."""
    path = _write(tmp_path / "k", key_file_text(ANNE))
    os.symlink(path, tmp_path / "link")
    for wrong in (tmp_path / "link", tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError):
            read_key_file(str(wrong), needs_secret=True)
