"""Writes: POST /v0/topics/T.

Each request becomes one frame, which is appended as a whole or not at all. The frames of the requests that
wait for one topic travel to its shard together, as one push with one wake-up: a lane has at most
LANE_PUSHES_MAX pushes in flight, and what arrives meanwhile goes with the next one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ringlog.access.engine_facts import create_forbidden, needs_admin_to_create
from ringlog.actors.http_gateway.admin.topics import requested_settings
from ringlog.actors.http_gateway.api.request import Request, Response, check_structure
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.records.cloud_events import (
    BATCH,
    EVENT,
    CloudEvent,
    Events,
    is_event,
    read_events,
)
from ringlog.client.connection.session import Session
from ringlog.client.requests.results import Appended, AppendedOnce
from ringlog.client.write.batch import Batch, joined
from ringlog.client.write.fields import NewRecord
from ringlog.client.write.idempotent_append import check_idempotency_key
from ringlog.client.write.keyed_append import append_keyed
from ringlog.client.write.stream import Stream
from ringlog.envelope import messages as m
from ringlog.errors import (
    BatchTooLarge,
    InvalidRequest,
    RecordTooLarge,
    RequestTimeout,
    RinglogError,
    StaleEpoch,
    Throttled,
    TopicNotFound,
)
from ringlog.frame import codec as frame_codec
from ringlog.frame.header import append_header_template
from ringlog.frame.metadata import NOT_JSON, fields_of
from ringlog.limits import (
    HTTP_LANE_PUSHES_MAX,
    HTTP_LANES_MAX,
    HTTP_META_KEYS_MAX,
    HTTP_WRITE_BYTES_MAX,
    NODE_BYTES_MAX,
)
from ringlog.types import Durability, PayloadKind

if TYPE_CHECKING:
    from ringlog.access.keys import Principal
    from ringlog.actors.http_gateway.gateway import Gateway
    from ringlog.aio import Client

_RETRIES_MAX = 3
"""Attempts of a write whose topic is deleted again and again meanwhile."""
_RECORD_LEVEL = 3
"""Level of nesting of a record: the body, its list of records, the record."""
_FIELDS = b"tag\0node\0meta\0"
_TAG, _NODE, _META = 1, 2, 4
_NULL = Raw(b"null")
_HEADERS = {
    kind: append_header_template(flags=frame_codec.flags_of(Durability.EPHEMERAL, kind))
    for kind in (PayloadKind.JSON, PayloadKind.BYTES)
}
"""Frames ask for no more than the topic's own durability class."""
_encode = msgspec.json.Encoder().encode


class WriteRecord(msgspec.Struct):
    """One record of a write. `data` is any JSON value, {"$base64": text} or {"$text": text}."""

    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw = _NULL


class WriteBody(msgspec.Struct):
    """Body of a write."""

    records: list[WriteRecord]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: dict[str, Any] | None = None
    return_seqs: bool = True
    disable_backpressure: bool = False


class WriteReply(msgspec.Struct):
    """Response to a write."""

    topic: str
    first_seq: int
    last_seq: int
    seqs: list[int] | UnsetType
    head_seq: int
    epoch: int
    count: int
    created: bool
    deduped: bool
    performance: dict[str, float]


_decode_string = msgspec.json.Decoder(str).decode
_decode_body = msgspec.json.Decoder(WriteBody).decode


async def write(request: Request) -> Response:
    """Append the records of one request."""
    if is_event(request):
        return await _write_events(request)
    clock = request.gateway.clock
    begin_ns = clock.monotonic_ns()
    write = decode_write(await request.body())
    body = write.body
    if key := request.header("idempotency-key"):
        body.idempotency_key = body.idempotency_key or key
    body.return_seqs &= request.query_bool("return_seqs", True)
    reply = await request.gateway.lanes.publish(request.principal, request.topic, write)
    reply.performance["server_total_ms"] = round((clock.monotonic_ns() - begin_ns) / 1e6, 3)
    return Response(201 if reply.created else 200, _encode(reply))


async def _write_events(request: Request) -> Response:
    """Append CloudEvents. One that the topic has already keeps its first seq."""
    gateway, topic = request.gateway, request.topic
    begin_ns = gateway.clock.monotonic_ns()
    records = await read_events(request)
    created = await gateway.lanes.require_topic(request.principal, topic)
    appended = await gateway.lanes.append_once(topic, records)
    info = gateway.client.connection.topics.cached(topic)
    times = {} if appended.deduped or info is None else gateway.commit_times(info.shard, appended.durability)
    reply = WriteReply(
        topic, appended.first_seq, appended.last_seq,
        list(appended.seqs) if request.query_bool("return_seqs", True) else UNSET,
        max(appended.seqs), appended.epoch, len(records), created, appended.deduped, times,
    )  # fmt: skip
    reply.performance["server_total_ms"] = round((gateway.clock.monotonic_ns() - begin_ns) / 1e6, 3)
    return Response(201 if created else 200, _encode(reply))


class DecodedWrite(NamedTuple):
    """A decoded body, and what its text tells about all records at once."""

    body: WriteBody
    bytes: int
    has_wrapped: bool
    """Data may be wrapped in {"$base64": …} or {"$text": …}."""
    fields: int
    """A bit for each of _FIELDS that a record may have."""


def decode_write(text: bytes) -> DecodedWrite:
    """Decode the body of a write, or a message that contains it. Raises InvalidRequest."""
    is_compact, fields = check_structure(text, _RECORD_LEVEL, _FIELDS)
    try:
        if not is_compact:
            text = msgspec.json.format(text, indent=-1)
        return DecodedWrite(_decode_body(text), len(text), b"$" in text, fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"the body is not valid: {e}") from None


class WriteLanes:
    """One lane of writes for each topic that was written to lately."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lanes: OrderedDict[tuple[str, bool], _Lane] = OrderedDict()
        self.bytes: int = 0
        """Bytes of all frames that are not settled."""

    async def publish(self, principal: Principal, topic: str, write: DecodedWrite) -> WriteReply:
        """Append the records of a write to a topic. Raises what the engine refuses."""
        body = write.body
        config = None
        if body.config is not None:
            config = requested_settings(body.config)
            if not principal.is_unrestricted:
                _authorise_config(principal, topic, body, config)
        key = check_idempotency_key(body.idempotency_key)
        frame = self._frame(write)
        self._require_room(len(frame))
        count, created = len(body.records), False
        session = self._gateway.client.connection
        for attempt in range(_RETRIES_MAX):
            if session.topics.cached(topic) is None:
                created |= await self._require_topic(principal, session, topic, body, config)
            try:
                appended, head = await self._append(
                    session, topic, frame, count, key, body.disable_backpressure
                )
                break
            except (TopicNotFound, StaleEpoch) as e:
                if e.outcome == "unknown" or attempt + 1 == _RETRIES_MAX:
                    raise
                session.topics.forget(topic)
        first = appended.first_seq
        times: dict[str, float] = {}
        if not appended.deduped and (info := session.topics.cached(topic)) is not None:
            times = self._gateway.commit_times(info.shard, appended.durability)
        return WriteReply(
            topic, first, appended.last_seq,
            [*range(first, appended.last_seq + 1)] if body.return_seqs else UNSET,
            head, appended.epoch, count, created, appended.deduped, times,
        )  # fmt: skip

    async def append_once(self, topic: str, records: Sequence[NewRecord]) -> AppendedOnce:
        """Append records with dedup ids to a topic that exists."""
        size = sum(len(record.data or b"") for record in records)
        self._require_room(size)
        self.bytes += size
        try:
            appended = await self._gateway.client.append_many(topic, records, create=False)
        finally:
            self.bytes -= size
        assert isinstance(appended, AppendedOnce)
        return appended

    def _require_room(self, size: int) -> None:
        if self.bytes + size > HTTP_WRITE_BYTES_MAX:
            raise Throttled(
                "too many bytes of writes are in progress: retry later", limit="write_bytes",
                max=HTTP_WRITE_BYTES_MAX, retry_after_ms=1_000,
            )  # fmt: skip

    async def _append(
        self, session: Session, topic: str, frame: bytearray, count: int, key: str, disable_backpressure: bool
    ) -> tuple[Appended, int]:
        """Append one frame. Returns the result, and the head of the topic right after it as far as known."""
        lane = self._lane(session, topic, disable_backpressure)
        self.bytes += len(frame)
        try:
            if key:
                appended = await self._gateway.client.run(append_keyed(session, lane.stream, frame, key))
                return appended, appended.last_seq
            return await lane.push(frame, count)
        finally:
            self.bytes -= len(frame)

    async def require_topic(self, principal: Principal, topic: str) -> bool:
        """Look the topic up, or create it with defaults. Returns whether this call created it."""
        session = self._gateway.client.connection
        return await self._require_topic(principal, session, topic, WriteBody([]), None)

    async def _require_topic(
        self,
        principal: Principal,
        session: Session,
        topic: str,
        body: WriteBody,
        config: dict[str, Any] | None,
    ) -> bool:
        """Look the topic up, or create it if the write may. Returns whether this call created it."""
        run = self._gateway.client.run
        try:
            await run(_resolved(session, topic))
            return False
        except TopicNotFound:
            auto_create = body.create is None and (config or {}).get("auto_create", True)
            if not (body.create or auto_create):
                raise
        if needs_admin_to_create(principal, m.Append(topic, 1, create=True, config=config)):
            raise create_forbidden(topic)
        put = m.TopicPut(topic, config or {}, "create", allow_inert=True)
        info = await run(session.topics.ask_name_owner(topic, put))
        session.topics.cache(info)
        return bool(info.created)

    def _lane(self, session: Session, topic: str, disable_backpressure: bool) -> _Lane:
        key = (topic, disable_backpressure)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(
                self._gateway.loop, self._gateway.client,
                session.open_stream(topic, create=False, disable_backpressure=disable_backpressure),
            )  # fmt: skip
            self._drop_idle_lanes(session)
        else:
            self._lanes.move_to_end(key)
        return lane

    def _drop_idle_lanes(self, session: Session) -> None:
        """Forget the lanes that were used longest ago, beyond HTTP_LANES_MAX. A lane in use stays."""
        for key in tuple(islice(self._lanes, max(len(self._lanes) - HTTP_LANES_MAX, 0))):
            if self._lanes[key].is_idle:
                session.streams.discard(self._lanes.pop(key).stream)

    # -- from a request to a frame --------------------------------------------------------------------

    def _frame(self, write: DecodedWrite) -> bytearray:
        body, fields, limits = write.body, write.fields, self._gateway.settings.limits
        records = body.records
        if not 0 < len(records) <= limits.max_batch_records:
            if not records:
                raise InvalidRequest("records must not be empty", records=0, min=1)
            raise BatchTooLarge(
                f"a write must have at most {limits.max_batch_records} records, got {len(records)}",
                records=len(records), max=limits.max_batch_records,
            )  # fmt: skip
        payloads: list[bytes | None] = [bytes(record.data) for record in records]
        kind = PayloadKind.JSON
        if write.has_wrapped:
            kind = _unwrap(payloads)
        columns: dict[str, list[Any]] = {}
        if fields & _TAG:
            columns["tags"] = [record.tag for record in records]
        if fields & _NODE or body.node is not None:
            batch_node = body.node
            columns["nodes"] = [batch_node if record.node is None else record.node for record in records]
            _require_node_sizes(columns["nodes"])
        if fields & _META:
            columns["metas"] = [_meta(index, record.meta) for index, record in enumerate(records)]
        if write.bytes > limits.max_record_bytes:
            self._require_sizes(payloads, columns.get("metas"))
        return frame_codec.encode_single_frame(payloads, columns, _HEADERS[kind])

    def _require_sizes(self, payloads: list[bytes | None], metas: list[bytes | None] | None) -> None:
        most = self._gateway.settings.limits.max_record_bytes
        for index, payload in enumerate(payloads):
            size = len(payload or b"") + len((metas[index] if metas else None) or b"")
            if size > most:
                raise RecordTooLarge(
                    f"record {index} must have at most {most} bytes, got {size}", index=index, bytes=size,
                    max=most,
                )  # fmt: skip


class _Lane:
    """The writes to one topic, in the order of their arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client, stream: Stream) -> None:
        self._loop, self._client, self.stream = loop, client, stream
        self._waiting: list[tuple[bytearray, int, asyncio.Future[tuple[Appended, int]]]] = []
        self._pushes = 0
        self._is_scheduled = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._pushes

    def push(self, frame: bytearray, count: int) -> asyncio.Future[tuple[Appended, int]]:
        """Append a frame of `count` records, together with others of this turn of the loop."""
        future: asyncio.Future[tuple[Appended, int]] = self._loop.create_future()
        self._waiting.append((frame, count, future))
        if not self._is_scheduled and self._pushes < HTTP_LANE_PUSHES_MAX:
            self._is_scheduled = True
            self._loop.call_soon(self._send)
        return future

    def _send(self) -> None:
        self._is_scheduled = False
        sent, self._waiting = self._waiting, []
        if not sent:
            return
        self._pushes += 1
        batch = Batch(self.stream)
        batch.split()
        batch.expect_frames(len(sent))
        batch.records = sum([count for _, count, _ in sent])
        batch.when_done(lambda _: self._settled(batch, sent))
        self.stream.send_frames(batch, *joined([frame for frame, _, _ in sent]))
        _ = self._client.connection  # Its loop must look for the settlement from now on.

    def _settled(
        self, batch: Batch, sent: list[tuple[bytearray, int, asyncio.Future[tuple[Appended, int]]]]
    ) -> None:
        self._pushes -= 1
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send)
        assert batch.seqs is not None
        seqs: list[int] = batch.seqs.tolist()
        errors = batch.errors or {}
        head = max([seq + count - 1 for seq, (_, count, _) in zip(seqs, sent, strict=True)])
        topic, reached = self.stream.topic, self.stream.effective_durability
        for index, (_, count, future) in enumerate(sent):
            if future.done():
                continue
            first = seqs[index]
            if index in errors:
                future.set_exception(errors[index])
            elif not first:
                future.set_exception(_forgotten(topic))
            else:
                future.set_result((
                    Appended(
                        topic, batch.epoch, first, first + count - 1, count, reached, False, batch.commit_ts
                    ),
                    head,
                ))  # fmt: skip


def _resolved(session: Session, topic: str) -> Any:
    yield session.topics.resolve(topic)


def _forgotten(topic: str) -> RinglogError:
    """A retry after a crash found the records stored, and their numbers no longer known."""
    return RequestTimeout(
        "the records are stored, and the engine no longer knows their numbers", outcome="unknown", topic=topic
    )


def _authorise_config(principal: Principal, topic: str, body: WriteBody, config: dict[str, Any]) -> None:
    from ringlog.access.keys import authorise

    authorise(principal, m.Append(topic, 1, create=body.create, config=config))


def _unwrap(payloads: list[bytes | None]) -> PayloadKind:
    """Replace {"$base64": …} and {"$text": …} by their bytes. Returns the kind of all payloads together."""
    kind = PayloadKind.JSON
    for index, payload in enumerate(payloads):
        if payload is None or not payload.startswith(b"{") or b'"$' not in payload[:16]:
            continue
        fields = fields_of(payload)
        if fields is None or len(fields) != 1:
            continue
        [(name, value)] = fields.items()
        if name == "$base64":
            payloads[index] = _from_base64(index, value)
        elif name == "$text" and (text := _string_of(value)) is not None:
            payloads[index] = text.encode()
        else:
            continue
        kind = PayloadKind.BYTES
    return kind


def _string_of(value: Raw) -> str | None:
    """Return a JSON string decoded; None if the value is no string."""
    try:
        return _decode_string(value)
    except NOT_JSON:
        return None


def _from_base64(index: int, value: Raw) -> bytes:
    try:
        return base64.b64decode(_decode_string(value), validate=True)
    except (*NOT_JSON, binascii.Error, ValueError):
        raise InvalidRequest(
            f"records[{index}].data: $base64 must be base64 with padding", index=index
        ) from None


def _meta(index: int, meta: Raw) -> bytes | None:
    text = bytes(meta)
    if text == b"null":
        return None
    if not text.startswith(b"{"):
        raise InvalidRequest(f"records[{index}].meta must be an object", index=index)
    keys = len(msgspec.json.decode(text, type=dict[str, Raw]))
    if keys > HTTP_META_KEYS_MAX:
        raise InvalidRequest(
            f"records[{index}].meta must have at most {HTTP_META_KEYS_MAX} keys, got {keys}", index=index,
            keys=keys, max=HTTP_META_KEYS_MAX,
        )  # fmt: skip
    return text


def _require_node_sizes(nodes: list[str | None]) -> None:
    for index, node in enumerate(nodes):
        if node is not None and len(node) * 4 > NODE_BYTES_MAX and len(node.encode()) > NODE_BYTES_MAX:
            raise InvalidRequest(
                f"records[{index}].node must have at most {NODE_BYTES_MAX} bytes, got {len(node.encode())}",
                index=index, bytes=len(node.encode()), max=NODE_BYTES_MAX,
            )  # fmt: skip


ROUTES: tuple[Route, ...] = (
    Route(
        "POST", "/v0/topics/{}", write, lambda topic: m.Append(topic, 1),
        "Append records to a topic, and create it if needed", body=WriteBody, params=("topic",),
        query={"return_seqs": "false: leave `seqs` out of the reply."}, statuses=(201, 422),
        takes={EVENT: CloudEvent, BATCH: Events},
    ),
)  # fmt: skip
