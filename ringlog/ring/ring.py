"""Both ends of a ring in one module. layout.py defines the format and the rules."""

from __future__ import annotations

from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import RingConsumerState, RingProducerState, WakeupFlags
from ringlog.ring.producer import RingProducer

__all__ = ["RingConsumer", "RingConsumerState", "RingProducer", "RingProducerState", "WakeupFlags"]
