"""Kafka: one broker in KRaft mode, a producer with acks=all and no lingering, consumers of a group."""

from __future__ import annotations

import base64
import importlib
import os
import socket
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bench.systems.base import CONNECT_S, Batch, Blocking, PeerServer, Way
from bench.systems.programs import module, program

_LOG_LEVEL = 3
"""Errors alone."""
_HEAP = "-Xms1G -Xmx1G"
"""What its own start script gives it."""
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
log.dirs={directory}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
{sync}
"""


def require() -> None:
    """Raise PeerMissing when its server or its client is not installed."""
    program("kafka-server")
    module("confluent_kafka")


class Client(Blocking):
    """A producer, and a consumer of one partition whose position the group keeps.

    Partitions are assigned by hand: members of a subscription that wait for the common start do not poll, and
    so hold up the assignment of the next.
    """

    def __init__(self, address: str, topic: str, way: Way = Way.QUEUE) -> None:
        import confluent_kafka

        self._library = confluent_kafka
        self._address, self._topic = address, topic
        self._producer: Any = confluent_kafka.Producer(
            {"bootstrap.servers": address, "acks": "all", "linger.ms": 0, "log_level": _LOG_LEVEL}
        )
        self._member: Any = None
        self._failures: list[Any] = []

    async def put(self, payload: bytes) -> None:
        await self.put_many((payload,))

    async def put_many(self, payloads: Sequence[bytes]) -> None:
        # A worker's own partition: what it puts it can claim, whatever the others do.
        partition = {} if self._member is None else {"partition": self.number}
        for payload in payloads:
            self._producer.produce(self._topic, payload, on_delivery=self._delivered, **partition)
        self._producer.flush(CONNECT_S)
        if self._failures:
            raise RuntimeError(f"Kafka refused a message: {self._failures[0]}")

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failures.append(error)

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self.put_many(payloads)

    async def claim(self, most: int, wait_s: float) -> Batch:
        if self._member is None:
            self._join()
        found = [message for message in self._member.consume(most, wait_s) if message.error() is None]
        return Batch([message.value() for message in found], found)

    def _join(self) -> None:
        """Begin to read the partition of this client."""
        self._member = self._library.Consumer(
            {
                "bootstrap.servers": self._address,
                "group.id": f"workers-{self._topic}",
                "log_level": _LOG_LEVEL,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        self._member.assign([self._library.TopicPartition(self._topic, self.number)])

    async def ack(self, jobs: Batch) -> None:
        if jobs.names:
            self._member.commit(asynchronous=False)

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
        self._producer.flush(CONNECT_S)


class Server(PeerServer):
    """Synced by the system, as it comes, or with each message."""

    name = "kafka"
    warm_s = 10.0  # Java compiles what is used.
    _SYNCS: ClassVar = {"page": "", "fsync": "log.flush.interval.messages=1"}

    def __init__(self, durability: str) -> None:
        broker, controller = free_ports(2)
        self.address = f"127.0.0.1:{broker}"

        def command(directory: Path) -> list[str]:
            file = directory / "server.properties"
            file.write_text(
                _PROPERTIES.format(
                    broker=broker, controller=controller, directory=directory, sync=self._SYNCS[durability]
                )
            )
            run = program("kafka-server")
            cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            subprocess.run(
                [run, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(file)],
                check=True,
                capture_output=True,
            )
            return [run, "kafka.Kafka", str(file)]

        super().__init__(command, {**os.environ, "KAFKA_JAVA_OPTIONS": _HEAP})

    def is_ready(self) -> bool:
        """See PeerServer.is_ready."""
        host, _, port = self.address.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def create(self, topic: str, way: Way, consumers: int = 1) -> None:
        api: Any = importlib.import_module("confluent_kafka.admin")
        admin = api.AdminClient({"bootstrap.servers": self.address, "log_level": _LOG_LEVEL})
        admin.create_topics([api.NewTopic(topic, consumers, 1)])[topic].result(CONNECT_S)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on just now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
