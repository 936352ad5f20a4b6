"""Changes of the text of a keys file that keep its other entries, comments and layout. Pure.

Each function parses its result, and raises ConfigError if it is not exactly the wanted change. A file in
another layout than `[[keys]]` tables is therefore never damaged.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ringlog.access.key_ring import KeyEntry, KeyKind
from ringlog.access.key_sources import parse_keys
from ringlog.errors import ConfigError

HEADER = "# Keys of ringlog clients. `ringlog key` changes this file; the engine reads it every 2 s.\n"
_TABLE = "[[keys]]"
_FIELDS = {KeyKind.CURVE: "public_key", KeyKind.BEARER: "bearer_sha256"}


def entry_text(
    name: str, kind: KeyKind, value: str, scopes: Sequence[str] = (), prefixes: Sequence[str] = ()
) -> str:
    """Return the table of one key. `value` is the public CURVE key, or the digest of the bearer key."""
    lines = [_TABLE, f"name = {_quoted(name)}", f"{_FIELDS[kind]} = {_quoted(value)}"]
    if scopes:
        lines.append(f"scopes = [{', '.join(map(_quoted, scopes))}]")
    if prefixes:
        lines.append(f"prefixes = [{', '.join(map(_quoted, prefixes))}]")
    return "\n".join(lines) + "\n"


def with_entry(text: str, entry: str, file: str) -> str:
    """Return the file with one more entry at its end. Raises ConfigError."""
    before = parse_keys(text, file)
    changed = f"{text.rstrip()}\n\n{entry}" if text.strip() else f"{HEADER}\n{entry}"
    _require_entries(changed, [*before, *parse_keys(entry, file)], file)
    return changed


def without_entries(text: str, name: str, file: str) -> str:
    """Return the file without the entries of this name, and without the comments right above them.

    Raises ConfigError.
    """
    kept = [entry for entry in parse_keys(text, file) if entry.principal.name != name]
    lines = text.splitlines(keepends=True)
    for begin, end in reversed(list(_tables(lines))):
        if _name_of("".join(lines[begin:end])) == name:
            while begin and lines[begin - 1].lstrip().startswith("#") and not _is_header(lines, begin - 1):
                begin -= 1
            while end < len(lines) and not lines[end].strip():
                end += 1
            del lines[begin:end]
    changed = "".join(lines)
    _require_entries(changed, kept, file)
    return changed


def _is_header(lines: Sequence[str], at: int) -> bool:
    return at == 0 and lines[at] == HEADER


def _tables(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first line of each table, and the line after its last field."""
    begins = [at for at, line in enumerate(lines) if line.lstrip().startswith("[[")]
    for begin, limit in pairwise([*begins, len(lines)]):
        end = limit
        while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
            end -= 1
        yield begin, end


def _name_of(table: str) -> str | None:
    try:
        return str(tomllib.loads(table)["keys"][0]["name"])
    except (tomllib.TOMLDecodeError, KeyError, IndexError, TypeError):
        return None


def _require_entries(text: str, wanted: Sequence[KeyEntry], file: str) -> None:
    try:
        is_wanted = parse_keys(text, file) == list(wanted)
    except ConfigError as e:
        if "twice" in e.message:
            raise
        is_wanted = False
    if not is_wanted:
        raise ConfigError(
            "keys file has another layout than one [[keys]] table per key: change it in an editor", file=file
        )


def _quoted(text: str) -> str:
    """Return a TOML string. JSON has the same escapes, and leaves only DEL unescaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
