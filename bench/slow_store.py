"""A slow object store: the part of S3 that ringlog's cold tier needs, in a separate process.

It keeps objects in memory and sleeps before every reply.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_spawn = multiprocessing.get_context("spawn")


class SlowStore:
    """Context manager. `environ` contains the variables that an engine needs to use the store."""

    def __init__(self, delay_s: float) -> None:
        self._requests = _spawn.Value("Q", 0)
        self._port = _spawn.Queue()
        self._process = _spawn.Process(target=_serve, args=(delay_s, self._port, self._requests), daemon=True)

    def __enter__(self) -> SlowStore:
        self._process.start()
        endpoint = f"http://127.0.0.1:{self._port.get(timeout=20)}"
        self.environ = {
            "AWS_ENDPOINT": endpoint, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench",
        }  # fmt: skip
        return self

    @property
    def requests(self) -> int:
        """Number of requests so far."""
        return int(self._requests.value)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(delay_s: float, port: Any, requests: Any) -> None:
    objects: dict[str, bytes] = {}
    uploads: dict[str, dict[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def do_PUT(self) -> None:
            name, query = self._asked()
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "partNumber" in query:
                uploads[query["uploadId"][0]][int(query["partNumber"][0])] = data
            else:
                objects[name] = data
            self._answer(200, etag=hashlib.md5(data).hexdigest())

        def do_POST(self) -> None:
            name, query = self._asked()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "uploadId" in query:
                parts = uploads.pop(query["uploadId"][0])
                objects[name] = b"".join(parts[i] for i in sorted(parts))
                body = _element("CompleteMultipartUploadResult", Key=name, ETag='"1"')
            else:
                upload = str(len(uploads) + 1)
                uploads[upload] = {}
                body = _element("InitiateMultipartUploadResult", Key=name, UploadId=upload)
            self._answer(200, body.encode(), etag="1")

        def do_GET(self) -> None:
            name, query = self._asked()
            if "list-type" in query:
                self._answer(200, _listing(objects, query.get("prefix", [""])[0]))
                return
            data = objects.get(name)
            if data is None:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                return
            bounds = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if bounds[1]:
                first, last = int(bounds[0]), min(int(bounds[2] or len(data) - 1), len(data) - 1)
                part = data[first : last + 1]
                self._answer(206, part, content_range=f"bytes {first}-{last}/{len(data)}", etag=_etag(data))
            else:
                self._answer(200, data, etag=_etag(data))

        def do_HEAD(self) -> None:
            name, _ = self._asked()
            data = objects.get(name)
            self._answer(404 if data is None else 200, data or b"", etag=_etag(data or b""), is_head=True)

        def do_DELETE(self) -> None:
            name, _ = self._asked()
            objects.pop(name, None)
            self._answer(204)

        def _asked(self) -> tuple[str, dict[str, list[str]]]:
            with requests.get_lock():
                requests.value += 1
            time.sleep(delay_s)
            parts = urlsplit(self.path)
            name = unquote(parts.path).lstrip("/").partition("/")[2]
            return name, parse_qs(parts.query, keep_blank_values=True)

        def _answer(
            self,
            status: int,
            body: bytes = b"",
            *,
            etag: str = "",
            content_range: str = "",
            is_head: bool = False,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            if etag:
                self.send_header("ETag", f'"{etag}"')
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            if not is_head:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_address[1])
    server.serve_forever()


def _element(name: str, **children: str) -> str:
    inner = "".join(f"<{child}>{escape(text)}</{child}>" for child, text in children.items())
    return f"<{name}>{inner}</{name}>"


def _etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _listing(objects: dict[str, bytes], prefix: str) -> bytes:
    found = "".join(
        f'<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>"{_etag(data)}"</ETag>'
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name, data in sorted(objects.items())
        if name.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()
