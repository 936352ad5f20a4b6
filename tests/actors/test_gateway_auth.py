"""Decisions of the ZAP handler, without sockets."""

from zmq.utils import z85

from ringlog.access.key_ring import KeyRing, key_id
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.actors.gateway.front_end.zap import answer
from ringlog.link.curve import new_key

ANNE, BERT = new_key(), new_key()


def _zap(domain=b"ringlog.tcp", mechanism=b"CURVE", key=None):
    credentials = [z85.decode(key or ANNE.public)] if mechanism == b"CURVE" else []
    return [b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, *credentials]


def test_zap_admits_listed_curve_keys_to_the_tcp_domain_only():
    """ZAP requires exactly the TCP domain, exactly CURVE, and exactly a listed key."""
    ring = KeyRing([(key_id(ANNE.public.decode()), Principal("anne", SCOPES))])
    good = answer(_zap(), ring)
    assert (good[2], good[4]) == (b"200", key_id(ANNE.public.decode()).encode())
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
    reply = answer(_zap(domain=b"ringlog.ipc", mechanism=b"NULL"), KeyRing())
    assert (reply[2], reply[4]) == (b"200", b"local")
