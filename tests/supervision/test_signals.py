"""A signal ends a poll, even if it arrives just before the wait begins."""

from __future__ import annotations

import os
import select
import signal

from ringlog.signals import SignalInbox, StopFlag


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_signals_are_taken_once_and_in_order() -> None:
    inbox = SignalInbox((signal.SIGUSR1, signal.SIGUSR2))
    try:
        assert not inbox.has_signals()
        send(signal.SIGUSR1)
        send(signal.SIGUSR2)
        assert inbox.has_signals()
        assert readable(inbox.fileno())
        assert inbox.take_signals() == [signal.SIGUSR1, signal.SIGUSR2]
        assert not readable(inbox.fileno())
        assert inbox.take_signals() == []
    finally:
        inbox.close()
        inbox.close()


def test_close_restores_the_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    SignalInbox((signal.SIGUSR1,)).close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_number_of_kept_signals_is_bounded() -> None:
    inbox = SignalInbox((signal.SIGUSR1,))
    try:
        for _ in range(10_000):
            send(signal.SIGUSR1)
        assert 1 <= len(inbox.take_signals()) <= 64
        assert not readable(inbox.fileno())
    finally:
        inbox.close()


def test_the_stop_flag_stays_set_and_its_descriptor_is_drained() -> None:
    hangups: list[int] = []
    stop = StopFlag(lambda: hangups.append(1))
    try:
        send(signal.SIGHUP)
        assert not stop.is_set()
        assert hangups == [1]
        stop.call_on_hangup(lambda: hangups.append(2))
        send(signal.SIGHUP)
        assert not stop.is_set()
        assert hangups == [1, 1, 2]
        send(signal.SIGTERM)
        assert readable(stop.fileno())
        assert stop.is_set()
        assert not readable(stop.fileno())
        assert stop.is_set()
    finally:
        stop.close()
