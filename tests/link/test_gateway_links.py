"""The links of a client over a gateway: how they end."""

from __future__ import annotations

import pytest
import zmq

from ringlog.clock import SystemClock
from ringlog.link.address import Address
from ringlog.link.gateway_links import GatewayLinks
from ringlog.link.timers import Timers


class LostDescriptors:
    """A set that does not know its descriptors any more, as after an interrupt in the middle of a change."""

    def watch(self, fd):
        pass

    def unwatch(self, fd):
        raise FileNotFoundError


def test_a_close_that_fails_leaves_no_socket_open(tmp_path):
    """An open socket blocks the garbage collector for ever when it frees the context."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(f"ipc://{tmp_path}/s")
        links = GatewayLinks(
            Address(endpoint=f"ipc://{tmp_path}/s"),
            clock=SystemClock(),
            timers=Timers(),
            fds=LostDescriptors(),
        )
        links.connect()
        with pytest.raises(FileNotFoundError):
            links.close()
        assert links._context.closed
