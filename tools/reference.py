"""Generate the tables of docs/reference from the code: `make reference`.

A page marks a table by `<!-- table: NAME -->` and `<!-- end -->`. The code determines the rows of a table and
their first columns. The other columns are written by hand. The program keeps the handwritten cells of a row
with the same first cell. After a rename it keeps those of the only old row whose other generated cells are
equal. A new row has empty cells. tests/docs/test_reference.py fails for empty cells and for a page that is
not current.
"""

from __future__ import annotations

import functools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cyclopts
import msgspec

from ringlog import config, environment, errors, settings
from ringlog.cli.app import build
from ringlog.cli.outcome import CliExit
from ringlog.envelope.status_metrics import families
from tools import log_events

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
REGION = re.compile(r"(<!-- table: ([a-z._-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CELLS = re.compile(r"(?<!\\)\|")


class Table(NamedTuple):
    """Generated rows, the headers of their columns, and the headers of the handwritten columns."""

    headers: tuple[str, ...]
    written: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def main() -> None:
    """Update the pages."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        if (new := current(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))  # noqa: T201


def current(text: str) -> str:
    """Return the page with current tables."""
    return REGION.sub(lambda found: found[1] + _region(found[2], found[3]) + found[4], text)


def empty_cells(text: str) -> list[str]:
    """Return the rows of tables on the page that have an empty handwritten cell."""
    found = []
    for region in REGION.finditer(text):
        if region[2] != "commands":
            headers = len(TABLES[region[2]]().headers)
            rows = _read(region[3])
            found += [f"{region[2]}: {key}" for key, cells in rows.items() if not all(cells[headers:])]
    return found


def _region(name: str, before: str) -> str:
    return "\n".join(_commands()) + "\n" if name == "commands" else render(TABLES[name](), _read(before))


def _read(text: str) -> dict[str, list[str]]:
    rows = [
        [cell.strip() for cell in CELLS.split(line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {cells[0]: cells for cells in rows[2:]}


def render(table: Table, before: dict[str, list[str]]) -> str:
    """Return the table as Markdown, with the handwritten cells of the previous one."""
    headers = (*table.headers, *table.written)
    lines = [_line(headers), _line(["---"] * len(headers))]
    keys = {row[0] for row in table.rows}
    gone = [cells for key, cells in before.items() if key not in keys]
    for row in table.rows:
        renamed = [cells for cells in gone if tuple(cells[1 : len(row)]) == row[1:]]
        kept = before.get(row[0]) or (renamed[0] if len(renamed) == 1 else [])
        written = kept[len(row) :] if len(kept) == len(headers) else []
        lines.append(_line([*row, *(written or [""] * len(table.written))]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# -- settings -----------------------------------------------------------------------------------------------


def _of_settings(table: typing.Mapping[str, settings.Setting], has_types: bool) -> Table:
    rows = [
        (
            f"`{row.name}`",
            _takes(row),
            f"`{_value(row.default)}`",
            *((row.topic_type_only or "log, queue",) if has_types else ()),
        )
        for row in table.values()
    ]
    headers = ("setting", "values", "default", *(("topic type",) if has_types else ()))
    return Table(headers, ("meaning",), rows)


def _takes(row: settings.Setting) -> str:
    if row.kind == settings.FLAG:
        found = "`true`, `false`"
    elif row.kind == settings.NAME:
        found = "a topic name"
    elif row.words:
        found = ", ".join(f"`{word}`" for word in row.words)
    else:
        found = f"{_number(row.low)} to {_number(row.high)} {row.unit}".rstrip()
        found += f"; 0: {row.zero}" if row.zero else ""
    return f"{found}, or `null`" if row.is_nullable else found


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(number: float) -> str:
    if isinstance(number, int) and number > 1 << 42 and number & (number + 1) == 0:
        return f"2^{number.bit_length()} − 1"
    return f"{number:,}"


def _engine(section: str) -> Table:
    struct = typing.get_type_hints(config.Config)[section]
    kinds = typing.get_type_hints(struct, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(struct):
        key = f"{section}.{field.name}"
        rows.append(
            (
                f"`{key}`",
                _default_of(key, field),
                _range_of(field.name, kinds[field.name]),
                f"`{environment.SETTING_VARIABLES[key]}`",
            )
        )
    return Table(("setting", "default", "values", "environment variable"), ("meaning",), rows)


def _default_of(key: str, field: Any) -> str:
    if key == "wal.shards":
        return f"number of CPUs, at most {config.SHARDS_BY_CPU_MAX}"
    value = field.default
    if value == "":
        return "empty"
    return _quantity(field.name, value) if not isinstance(value, bool | str) else f"`{_value(value)}`"


def _quantity(name: str, value: float) -> str:
    if re.search(r"(^|_)bytes(_|$)", name):
        for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if isinstance(value, int) and value >= size and value % size == 0 and value < 1 << 60:
                return f"{value // size:,} {unit}{'/s' if name.endswith('per_s') else ''}"
        return f"{_number(value)} {'byte' if value == 1 else 'bytes'}" if value else "0"
    if name.endswith("_ms"):
        return f"{_number(value)} ms"
    if name.endswith("_s"):
        return f"{value:,g} s"
    return _number(value)


def _range_of(name: str, kind: Any) -> str:
    if config.is_path(kind):
        return "path"
    base, meta = kind, None
    if typing.get_origin(kind) is typing.Annotated:
        base, meta = typing.get_args(kind)
    if typing.get_origin(base) is typing.Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(base))
    if base is bool:
        return "`true`, `false`"
    if base is str:
        return "text"
    assert meta is not None
    low = _quantity(name, meta.ge if meta.ge is not None else meta.gt)
    if meta.lt is not None:
        return f"{low} to below {_quantity(name, meta.lt)}"
    return f"{low} and more" if meta.le is None else f"{low} to {_quantity(name, meta.le)}"


def _variables() -> Table:
    rows = [(f"`{name}`", row.expected or "text") for name, row in environment.VARIABLES.items()]
    return Table(("variable", "values"), ("meaning",), rows)


# -- errors --------------------------------------------------------------------------------------------------


def _classes(of: type[errors.RinglogError], but: tuple[type, ...] = ()) -> list[Any]:
    found = [
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, of) and not issubclass(kind, but)
    ]  # fmt: skip
    return [kind for kind in found if kind not in {errors.RinglogError, errors.Refused}]


def _refused() -> Table:
    rows = [
        (f"`{kind.__name__}`", f"`{kind.code}`", str(int(kind.status)), _yes(kind.retriable))
        for kind in _classes(errors.Refused)
    ]  # fmt: skip
    return Table(("class", "code", "status", "retriable"), ("cause", "remedy"), rows)


def _other_errors() -> Table:
    rows = [
        (f"`{kind.__name__}`", f"`{kind.code}`", _yes(kind.retriable))
        for kind in _classes(errors.RinglogError, (errors.Refused,))
    ]
    return Table(("class", "code", "retriable"), ("cause", "remedy"), rows)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _process_exits() -> Table:
    rows = [(str(code.value), f"`{code.name.lower()}`") for code in errors.ExitCode]
    return Table(("code", "name"), ("meaning", "supervisor's action"), rows)


def _command_exits() -> Table:
    return Table(("code",), ("meaning",), [(str(int(code)),) for code in CliExit])


# -- metrics -------------------------------------------------------------------------------------------------


def _metrics() -> Table:
    rows = []
    for kind, name, _, labels, _ in families(_some_status()):
        suffix = "_total" if kind == "counter" else ""
        rows.append((f"`ringlog_{name}{suffix}`", kind, ", ".join(f"`{label}`" for label in labels) or "–"))
    return Table(("metric", "type", "labels"), ("meaning",), rows)


def _some_status() -> Any:
    """Return a status with every part that metrics are made from."""
    from ringlog.envelope import messages

    return _made(messages.EngineStatusReply)


def _made(kind: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _made(inner[0])
    if origin in {typing.Union, types.UnionType}:
        return _made(next(each for each in inner if each is not type(None)))
    if origin in {tuple, list}:
        return origin([_made(inner[0])])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{name: _made(hints[name]) for name in kind.__struct_fields__})
    return kind()


def _http_metrics() -> Table:
    from ringlog.actors.http_gateway.admin.health import GATEWAY_METRICS, SHARD_METRICS
    from ringlog.actors.http_gateway.admin.topic_metrics import OF_QUEUES, OF_TOPICS, TRUNCATED

    rows = []
    of_topics = [("gauge", name, text, ("topic",)) for name, text, _ in (*OF_TOPICS, *OF_QUEUES)]
    of_all = [
        *GATEWAY_METRICS,
        *(metric for metric, _ in SHARD_METRICS),
        *of_topics,
        ("gauge", *TRUNCATED, ()),
    ]
    for kind, name, text, labels in of_all:
        suffix = "_total" if kind == "counter" else ""
        shown = ", ".join(f"`{label}`" for label in labels) or "–"
        rows.append((f"`ringlog_{name}{suffix}`", kind, shown, text))
    return Table(("metric", "type", "labels", "meaning"), (), rows)


# -- HTTP ----------------------------------------------------------------------------------------------------


def _http_routes() -> Table:
    from ringlog.actors.http_gateway.api.documents import shown_path
    from ringlog.actors.http_gateway.routes import ROUTES

    rows = [(f"`{route.method} {shown_path(route)}`", _scopes_of(route), route.summary) for route in ROUTES]
    return Table(("request", "scopes", "what it does"), (), rows)


def _scopes_of(route: Any) -> str:
    from ringlog.access.permissions import rules_of

    if route.access is None:
        return "–"
    rules = rules_of(route.access(*("name" for _ in range(route.path.count("{}"))))) or ()
    return ", ".join(dict.fromkeys(f"`{scope}`" for rule in rules for scope in rule.scopes[:1]))


def _http_fields() -> Table:
    from ringlog.actors.http_gateway.api.documents import openapi, shown_path
    from ringlog.actors.http_gateway.routes import ROUTES

    document = openapi(ROUTES)
    rows: list[tuple[str, ...]] = []
    for route in ROUTES:
        if route.body is None or route.body.__name__ == "TopicConfigBody":
            continue
        path = shown_path(route)
        content = document["paths"][path][route.method.lower()]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        rows += _fields_of(document["components"]["schemas"], name, f"{route.method} {path}")
    return Table(("request", "field", "values", "default"), (), rows)


def _fields_of(schemas: Any, name: str, request: str) -> Iterator[tuple[str, ...]]:
    schema = schemas[name]
    for field, found in schema["properties"].items():
        default = "required" if field in schema.get("required", ()) else ""
        if "default" in found:
            default = f"`{_value(found['default'])}`"
        yield f"`{request}`", f"`{field}`", _kind_of(found), default
        inner = found.get("items", {}).get("$ref", "").rpartition("/")[2]
        if inner:
            yield from _fields_of(schemas, inner, f"{request}` `{field}[]")


def _kind_of(found: Any) -> str:
    if "anyOf" in found:
        return " or ".join(_kind_of(each) for each in found["anyOf"])
    if "enum" in found:
        return ", ".join(f"`{value}`" for value in found["enum"])
    if "$ref" in found:
        return "object"
    kind = str(found.get("type", "any JSON value"))
    return f"array of {_kind_of(found['items'])}" if kind == "array" and found.get("items") else kind


# -- log events ----------------------------------------------------------------------------------------------


def _log_events(logger: str) -> Table:
    by_text: dict[str, list[log_events.Event]] = {}
    for event in sorted(each for each in log_events.events() if each.logger == f"ringlog.{logger}"):
        by_text.setdefault(event.text, []).append(event)
    rows = []
    for text, found in by_text.items():
        levels = [level for level in log_events.LEVELS if any(level in event.levels for event in found)]
        facts = dict.fromkeys(fact for event in found for fact in event.facts)
        rows.append((f"`{text}`", ", ".join(levels), ", ".join(f"`{fact}`" for fact in facts) or "–"))
    return Table(("event", "level", "facts"), ("meaning",), rows)


# -- commands ------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    app = build()
    for name in _inner(app):
        command = app[name]
        if inner := list(_inner(command)):
            yield f"## ringlog {name}\n\n{command.help}\n"
            for each in inner:
                yield from _command(command[each], f"ringlog {name} {each}", "###")
        else:
            yield from _command(command, f"ringlog {name}", "##")


def _inner(app: cyclopts.App) -> Iterator[str]:
    return (name for name in app if not name.startswith("-") and app[name].show)


def _command(command: cyclopts.App, title: str, level: str) -> Iterator[str]:
    found = [each for each in command.assemble_argument_collection(parse_docstring=True) if each.show]
    usage, rows = [title], []
    for argument in found:
        positional = str(argument.field_info.kind) in {
            "POSITIONAL_OR_KEYWORD",
            "VAR_POSITIONAL",
            "POSITIONAL_ONLY",
        }
        word = argument.name.strip("-").upper()
        names = [word] if positional else sorted(argument.names, key=lambda text: not text.startswith("--"))
        many = argument.field_info.kind.name == "VAR_POSITIONAL"
        if positional:
            usage.append((word if argument.required else f"[{word}]") + ("..." if many else ""))
        elif argument.required:
            usage.append(f"{names[0]} {word}")
        value = "" if positional or argument.hint is bool else f" {word}"
        shown = f"`{names[0]}{value}`" + "".join(f", `{name}`" for name in names[1:])
        default = argument.field_info.default
        has_default = (
            not argument.required
            and default not in {None, "", False}
            and default is not argument.field_info.empty
        )
        rows.append(
            (
                shown,
                _cell(argument.parameter.help or ""),
                f"`{default}`" if has_default and default != () else "",
            )
        )
    if any(not argument.required and argument.field_info.kind.name == "KEYWORD_ONLY" for argument in found):
        usage.append("[OPTIONS]")
    text = re.split(r"\n\s*Parameters\n", command.help or "")[0]
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    yield f"{level} {title}\n"
    yield "\n\n".join(paragraphs) + "\n"
    examples = textwrap.dedent((command.help_epilogue or "").partition("\n")[2])
    yield f"```text\nusage: {' '.join(usage)}\n\n{examples}\n```\n"
    if rows:
        yield (
            "\n".join([_line(("argument", "meaning", "default")), _line(["---"] * 3), *map(_line, rows)])
            + "\n"
        )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


TABLES: dict[str, Callable[[], Table]] = {
    "topic-settings": lambda: _of_settings(settings.TOPIC_SETTINGS, has_types=True),
    "group-settings": lambda: _of_settings(settings.GROUP_SETTINGS, has_types=False),
    "call-settings": lambda: _of_settings(settings.CALL_SETTINGS, has_types=False),
    **{
        f"engine.{section}": (lambda section=section: _engine(section))  # type: ignore[misc]
        for section in dict.fromkeys(key.partition(".")[0] for key in environment.SETTING_VARIABLES)
    },
    "variables": _variables,
    "refused": _refused,
    "other-errors": _other_errors,
    "process-exits": _process_exits,
    "command-exits": _command_exits,
    "metrics": _metrics,
    "http-metrics": _http_metrics,
    "http-routes": _http_routes,
    "http-fields": _http_fields,
    **{
        f"log.{logger}": functools.partial(_log_events, logger)
        for logger in (
            "supervision",
            "process",
            "runtime",
            "shard",
            "scheduler",
            "gateway",
            "http_gateway",
            "keys",
            "compactor",
            "reclaimer",
            "relocator",
            "worker",
            "client",
            "spark",
        )
    },
}
"""Name of a table -> function that builds it. `commands` is made of sections instead of rows."""

if __name__ == "__main__":
    main()
