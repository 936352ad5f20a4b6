"""The API documents: they list every route, and every reference in them resolves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Raw

from ringlog.actors.http_gateway.api.channel_messages import CHANNELS
from ringlog.actors.http_gateway.api.documents import asyncapi, documented, openapi, shown_path
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.routes import ROUTES

Call = Callable[..., Any]
METHODS = {"get", "put", "post", "delete"}


def references(value: Any) -> Iterator[str]:
    """Return every reference of a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def resolve(document: Any, reference: str) -> Any:
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        document = document[part.replace("~1", "/").replace("~0", "~")]
    return document


def test_every_route_is_in_the_document() -> None:
    paths = openapi(ROUTES)["paths"]
    shown = {(method, path) for path, entry in paths.items() for method in entry if method in METHODS}
    assert shown == {(route.method.lower(), shown_path(route)) for route in ROUTES}


def test_every_operation_is_complete() -> None:
    document = openapi(ROUTES)
    ids = set()
    for path, entry in document["paths"].items():
        names = [each["name"] for each in entry.get("parameters", [])]
        assert names == re.findall(r"{(\w+)}", path)
        for method in METHODS & set(entry):
            operation = entry[method]
            assert operation["summary"]
            assert {"200", "401", "500", "503"} <= set(operation["responses"])
            ids.add(operation["operationId"])
    assert len(ids) == len(ROUTES)


def test_every_reference_resolves() -> None:
    for document in (openapi(ROUTES), asyncapi(CHANNELS)):
        found = set(references(document))
        assert found
        for reference in found:
            assert resolve(document, reference)


def test_a_struct_with_undecoded_json_is_documented() -> None:
    class Inner(msgspec.Struct):
        data: Raw
        meta: Raw = Raw(b"null")

    class Outer(msgspec.Struct, rename={"seq": "$seq"}):
        items: list[Inner] | None
        seq: int = 5

    globals()["Inner"] = Inner
    try:
        found = msgspec.json.schema(documented(Outer))["$defs"]["Outer"]
    finally:
        del globals()["Inner"]
    assert found["properties"]["$seq"] == {"type": "integer", "default": 5}
    assert found["required"] == ["items"]


def test_two_structs_with_one_name_have_two_names() -> None:
    def made(module: str) -> Any:
        return msgspec.defstruct("TwiceBody", [("a", int)], module=module)

    first, second = made("ringlog.one"), made("ringlog.two_words")
    assert documented(first).__name__ == "TwiceBody"
    assert documented(second).__name__ == "TwoWordsTwiceBody"
    assert documented(first).__name__ == "TwiceBody"


def test_a_path_shows_the_names_of_its_parts() -> None:
    async def none(_: Any) -> None: ...

    named = Route("GET", "/a/{}/b/{}", none, None, "", params=("x", "y"))
    unnamed = Route("GET", "/a/{}", none, None, "")
    assert (shown_path(named), shown_path(unnamed)) == ("/a/{x}/b/{y}", "/a/{name1}")


def test_the_documents_are_served(call: Call) -> None:
    first = call("GET", "/v0/openapi.json")
    assert (first.status, first.body["openapi"]) == (200, "3.1.0")
    assert "/v0/topics/{topic}" in first.body["paths"]
    second = call("GET", "/v0/asyncapi.json")
    assert (second.status, second.body["asyncapi"]) == (200, "3.1.0")
    assert set(second.body["channels"]) == {"watch", "work", "webSocket"}
