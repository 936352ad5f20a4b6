"""Resolution of names from the command line: `package.module:function`, and payload codecs.

Only the worker's processes import the program's modules, never the worker itself. Side effects of these
imports can therefore only harm a process that is replaced.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from ringlog.errors import UsageError
from ringlog.payload import JSON, RAW, TEXT, PayloadCodec

CODECS: dict[str, PayloadCodec[Any]] = {"raw": RAW, "text": TEXT, "json": JSON}


class CannotImport(UsageError):
    """The worker's function or codec cannot be imported. The text names the missing part or the error."""

    code = "cannot_import"


def check_name(name: str) -> None:
    """Raise UsageError unless the name has the form `package.module:function`."""
    module, colon, path = name.partition(":")
    parts = [*module.split("."), *path.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise UsageError("name the function as package.module:function", found=name)


def check_payload(name: str) -> None:
    """Raise UsageError unless the name is raw, text or json, or has the form `package.module:codec`."""
    if name not in CODECS:
        try:
            check_name(name)
        except UsageError:
            known = ", ".join(CODECS)
            raise UsageError(f"payload must be {known} or package.module:codec", found=name) from None


_GENERATOR = (
    "a function for jobs must be a plain function or a coroutine: calling a generator runs none of it"
)


def load(name: str) -> Any:
    """Return the object of this name.

    Raises CannotImport if the module or the object does not exist. An error that the module raises during its
    import propagates.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise  # The module exists, and one of its own imports is missing.
        raise CannotImport(f"module {e.name!r} does not exist", target=name) from None
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; is it {near[0]!r}?" if near else ""
            raise CannotImport(f"module {module_name!r} has no {path!r}{hint}", target=name)
        found = getattr(found, part)
    return found


def load_function(name: str) -> Any:
    """Return a function of one argument. Raises like `load`, and CannotImport if it is no plain function."""
    found = load(name)
    if not callable(found):
        raise CannotImport("the target is not callable", target=name, found=type(found).__name__)
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise CannotImport(_GENERATOR, target=name)
    return found


def require_executed(result: Any) -> None:
    """Raise TypeError if a function returned a generator or an awaitable: then none of its code has run."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.isawaitable(result):
        raise TypeError(f"{_GENERATOR}, found {type(result).__name__}")


def load_codec(name: str) -> PayloadCodec[Any]:
    """Return the codec raw, text, json, or an object with `decode`. Raises like `load`."""
    if name in CODECS:
        return CODECS[name]
    found: PayloadCodec[Any] = load(name)
    if not callable(getattr(found, "decode", None)):
        raise CannotImport(
            "a codec must have the methods encode and decode", target=name, found=type(found).__name__
        )
    return found
