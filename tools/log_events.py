"""Find the log events of the code, for the tables of docs/reference/log-events.md."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LOGGERS = ("say", "log_event")
"""Functions that log an event: (logger, level, event, **facts)."""
DAMAGE = "accept_damage"
"""Logs an error of the shard: (losses, event, **facts)."""
LEVELS = ("debug", "info", "warning", "error", "critical")


class Event(NamedTuple):
    """One log event at one place in the code."""

    text: str
    levels: frozenset[str]
    logger: str
    facts: tuple[str, ...]


@functools.cache
def events() -> tuple[Event, ...]:
    """Return all log events of the code."""
    return tuple(_found_events())


def _found_events() -> Iterator[Event]:
    from ringlog.worker import settlement, settler

    for text in (settlement.DONE, settlement.FAILED, settlement.REJECTED, settlement.CUT_OFF, settler.LOST):
        level = logging_name(settler._LEVELS.get(text, 40))
        yield Event(
            text, frozenset({level}), "ringlog.worker", ("queue", "seq", "deliveries", "ran_ms", "process")
        )
    for path in sorted([*(ROOT / "ringlog").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]):
        source = path.read_text()
        if "getLogger(" in source or f"{DAMAGE}(" in source:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield from _events_of(ast.parse(source), module)


def logging_name(level: int) -> str:
    """Return the name of a logging level."""
    return LEVELS[level // 10 - 1]


def _events_of(tree: ast.Module, module: str) -> Iterator[Event]:
    named = [
        _logger_of(node.args[0], module) for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _name_of(node.func) == "getLogger" and node.args
    ]  # fmt: skip
    named = named or ["ringlog.shard"]
    forwarding: dict[str, tuple[int, frozenset[str], tuple[str, ...]]] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        parameters = [each.arg for each in function.args.args]
        for call in _calls(function):
            if _name_of(call.func) in LOGGERS and len(call.args) == 3 and isinstance(call.args[0], ast.Name):
                levels, facts = _levels(call.args[1], function), _facts(call)
                for text in _texts(call.args[2], function):
                    yield Event(text, levels, named[0], facts)
                if isinstance(call.args[2], ast.Name) and call.args[2].id in parameters:
                    forwarding[function.name] = (parameters.index(call.args[2].id), levels, facts)
            elif _name_of(call.func) == DAMAGE:
                for text in _texts(call.args[1], function):
                    yield Event(text, frozenset({"error"}), "ringlog.shard", _facts(call))
            elif (
                isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS and call.args
                and isinstance(call.func.value, ast.Name) and call.func.value.id in {"log", "_log"}
                and isinstance(call.args[0], ast.Constant)
            ):  # fmt: skip
                yield Event(str(call.args[0].value), frozenset({call.func.attr}), named[0], ())
    for function in functions:
        for call in _calls(function):
            name = _name_of(call.func)
            if name in forwarding and isinstance(call.func, ast.Attribute):
                place, levels, facts = forwarding[name]
                given = call.args[place - 1] if len(call.args) >= place else None
                for text in _texts(given, function):
                    yield Event(text, levels, named[0], facts or _facts(call))


def _logger_of(node: ast.expr, module: str) -> str:
    """Return the name of a logger. For `__name__` it is the package; ringlog.aio counts as ringlog.client."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return ".".join(module.split(".")[:2]).replace("ringlog.aio", "ringlog.client")


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _facts(call: ast.Call) -> tuple[str, ...]:
    return tuple(each.arg for each in call.keywords if each.arg)


def _levels(node: ast.expr, function: ast.AST) -> frozenset[str]:
    found = {
        each.attr.lower()
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and each.attr.isupper()
    }
    for name in [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]:
        for value in _assigned(name, function):
            found |= {each.attr.lower() for each in ast.walk(value) if isinstance(each, ast.Attribute)}
    return frozenset(found & set(LEVELS))


def _texts(node: ast.expr | None, function: ast.AST) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp():
            return _texts(node.body, function) + _texts(node.orelse, function)
        case ast.Name():
            return [text for value in _assigned(node.id, function) for text in _texts(value, function)]
    return []


def _assigned(name: str, function: ast.AST) -> list[ast.expr]:
    found = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
    return [
        each.value for each in found if any(isinstance(to, ast.Name) and to.id == name for to in each.targets)
    ]
