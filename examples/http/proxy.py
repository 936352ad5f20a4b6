"""Serve page.html and pass /v0 on to the gateway: pages and the API then have one origin.

Usage: python proxy.py http://127.0.0.1:4000 8000. In production a web server does this (nginx: proxy_pass,
with proxy_buffering off for event streams).
"""

from __future__ import annotations

import http.client
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

PAGE = Path(__file__).with_name("page.html")
PASSED = ("content-type", "accept", "last-event-id", "authorization", "origin", "sec-fetch-site")


class Handler(BaseHTTPRequestHandler):
    """One connection of the browser."""

    gateway = ""

    def do_GET(self) -> None:
        """Serve the page, or pass the request on."""
        if self.path.startswith("/v0/"):
            self.do_POST()
            return
        page = PAGE.read_bytes()
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        """Pass the request on, and the reply back as it comes."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        connection = http.client.HTTPConnection(self.gateway)
        sent = {name: self.headers[name] for name in PASSED if name in self.headers}
        connection.request(self.command, self.path, body, sent)
        reply = connection.getresponse()
        self.send_response(reply.status)
        self.send_header("content-type", reply.getheader("content-type", "application/json"))
        self.end_headers()
        while piece := reply.read1():
            self.wfile.write(piece)
        connection.close()


if __name__ == "__main__":
    Handler.gateway = urlsplit(sys.argv[1]).netloc
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
