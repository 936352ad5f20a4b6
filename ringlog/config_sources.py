"""The sources of engine settings, their precedence, and the conversion of texts to values.

From strongest to weakest: flag (`--set section.key=value`), environment variable, TOML file, default. The
source of each value is recorded. One file is read: `--config`, else `RINGLOG_CONFIG`, else `./ringlog.toml`,
else `/etc/ringlog/ringlog.toml`.

A wrong value from a flag or the file is an error. A wrong value from the environment is a warning, and the
default applies, except for STRICT_ENVIRONMENT_KEYS. An unknown key is always an error.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from ringlog import environment, limits
from ringlog.config import Config, ConfigSection, FilePath, Text, is_path, to_plain
from ringlog.environment import SETTING_VARIABLES, STRICT_ENVIRONMENT_KEYS
from ringlog.errors import ConfigError, InvalidRequest
from ringlog.names import check_topic_name
from ringlog.quantities import parse_boolean, parse_duration, parse_size
from ringlog.settings import LOG, TOPIC_SETTINGS, check_settings, require_effect, require_no_auto_create

SYSTEM_FILE = "/etc/ringlog/ringlog.toml"
LOCAL_FILE = "ringlog.toml"
CONFIG_FILE_BYTES_MAX = 4 * limits.MIB

_TOPICS = "topics"
_SECTIONS = {name: kind for name, kind in get_type_hints(Config).items() if name != _TOPICS}
_TYPES: dict[str, Any] = {
    f"{section}.{key}": kind
    for section, struct in _SECTIONS.items()
    for key, kind in get_type_hints(struct, include_extras=True).items()
}

assert set(SETTING_VARIABLES) == set(_TYPES), "every key has its variable"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The effective configuration, the source of each value, and warnings."""

    config: Config
    sources: Mapping[str, str]
    """`section.key` -> `default`, `flag`, `environment RINGLOG_…` or `file <path>`."""
    warnings: Sequence[str] = ()
    file: str = ""
    """The TOML file that was read; empty if there was none."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (key, value, source) of every setting, in the order of the sections above."""
        plain = to_plain(self.config)
        named = [(path, plain[section][key], self.sources[path]) for path, section, key in _paths()]
        return named + [
            (f'topics."{name}"', table, self.sources[f"topics.{name}"])
            for name, table in self.config.topics.items()
        ]


@dataclass(slots=True)
class _Draft:
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=lambda: dict.fromkeys(_TYPES, "default"))
    topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str) -> None:
        self.values[path] = value
        self.sources[path] = source


def load_config(
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str = ".",
    *,
    config_file: str | None = None,
) -> LoadedConfig:
    """Load the configuration from all its sources.

    Args:
        flags: `section.key` -> text (see `parse_flags`).
        environ: Environment variables. None: those of this process.
        cwd: Directory from which relative paths are resolved.
        config_file: TOML file. None: `RINGLOG_CONFIG`, or one of the usual places.

    Raises:
        ConfigError: A setting is wrong. The text names the key and the error.
    """
    environ = os.environ if environ is None else environ
    draft = _Draft()
    path = _find_file(config_file, environ, cwd)
    if path:
        _read_file(draft, path)
    _read_environment(draft, environ)
    for name, text in (flags or {}).items():
        _require_known(name, "flag")
        draft.put(name, _from_text(name, text), "flag")
    config = _resolve(_assemble(draft), cwd)
    if absent := _missing_paths(config):
        draft.warnings.append(absent)
    return LoadedConfig(config, draft.sources, tuple(draft.warnings), path)


def _missing_paths(config: Config) -> str:
    """Return a warning about configured paths that do not exist; empty if there is none.

    The engine starts anyway, because a volume may be mounted later.
    """
    place = config.cold.dir
    if not place or os.path.isdir(place):
        return ""
    return (
        f"there is no directory {place} (cold.dir): until it is mounted, segments in it cannot be read and "
        "none is moved to it"
    )


def parse_flags(pairs: Sequence[str]) -> dict[str, str]:
    """Split `section.key=value` arguments. Raises ConfigError for one without `=`."""
    flags = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError("--set must be section.key=value", found=pair)
        flags[name.strip()] = text.strip()
    return flags


def _paths() -> list[tuple[str, str, str]]:
    return [(path, *path.split(".", 1)) for path in _TYPES]  # type: ignore[misc]


def _assemble(draft: _Draft) -> Config:
    sections = {
        name: struct(
            **{key: draft.values[f"{name}.{key}"] for key in _keys(struct) if _has(draft, name, key)}
        )
        for name, struct in _SECTIONS.items()
    }
    return Config(**sections, topics=draft.topics)


def _keys(struct: type[ConfigSection]) -> tuple[str, ...]:
    return struct.__struct_fields__


def _has(draft: _Draft, section: str, key: str) -> bool:
    return f"{section}.{key}" in draft.values


def _resolve(config: Config, cwd: str) -> Config:
    """Make paths absolute, so that they mean the same in every process."""

    def absolute(path: str) -> str:
        return os.path.normpath(os.path.join(os.path.abspath(cwd), os.path.expanduser(path))) if path else ""

    _require_text(config)
    replace = msgspec.structs.replace
    for path, section, key in _paths():
        if is_path(_TYPES[path]):
            struct = getattr(config, section)
            struct = replace(struct, **{key: absolute(getattr(struct, key))})
            config = replace(config, **{section: struct})
    if not config.run.dir:
        config = replace(config, run=replace(config.run, dir=os.path.join(config.data.dir, "run")))
    _require_text(config)
    return config


def _require_text(config: Config) -> None:
    """Raise ConfigError for a setting or path with a NUL character, or one that is not UTF-8.

    No path can contain NUL, and processes exchange settings as UTF-8. Other bytes of the command line, the
    environment or the working directory's name are surrogates here.
    """
    for section, struct in _SECTIONS.items():
        for key in _keys(struct):
            value = getattr(getattr(config, section), key)
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"{section}.{key} must not contain a NUL character", found=ascii(value))
            if isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise ConfigError(
                        f"{section}.{key} must be UTF-8; under LC_ALL=C set PYTHONUTF8=1", found=ascii(value)
                    ) from None


# -- the file -----------------------------------------------------------------------------------------


def _find_file(named: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Return the path of the file to read; empty if none is named and none exists in the usual places."""
    wanted = named or environ.get(environment.CONFIG, "")
    if wanted:
        return os.path.join(os.path.abspath(cwd), wanted)
    usual = (os.path.join(os.path.abspath(cwd), LOCAL_FILE), SYSTEM_FILE)
    return next((path for path in usual if os.path.isfile(path)), "")


def _read_file(draft: _Draft, path: str) -> None:
    tables = _parse_file(path)
    source = f"file {path}"
    for section, table in tables.items():
        if section != _TOPICS and section not in _SECTIONS:
            raise _unknown(section, f"file {path}", [*_SECTIONS, _TOPICS])
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a table", file=path)
        if section == _TOPICS:
            _read_topics(draft, table, path)
            continue
        for key, value in table.items():
            name = f"{section}.{key}"
            _require_known(name, source)
            draft.put(
                name, _from_text(name, value) if isinstance(value, str) else _checked(name, value), source
            )


def _parse_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(text) > CONFIG_FILE_BYTES_MAX:
            raise ConfigError("configuration file is too large", file=path, max_bytes=CONFIG_FILE_BYTES_MAX)
        return tomllib.loads(text.decode())
    except OSError as e:
        raise ConfigError("configuration file cannot be read", file=path, reason=e.strerror) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError("configuration file is not TOML", file=path, reason=str(e)) from None


def _read_topics(draft: _Draft, tables: dict[str, Any], path: str) -> None:
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f'topics."{name}" must be a table', file=path)
        try:
            check_topic_name(name)
            require_effect(check_settings(TOPIC_SETTINGS, table), table.get("type", LOG))
            require_no_auto_create(table)
        except InvalidRequest as e:
            raise ConfigError(f'topics."{name}": {e.message}', file=path, **e.detail) from None
        draft.topics[name] = table
        draft.sources[f"topics.{name}"] = f"file {path}"


def _require_known(name: str, source: str) -> None:
    if name.split(".", 1)[0] == _TOPICS:
        raise ConfigError("topics are configured in the file or by `ringlog topic`", key=name, source=source)
    if name not in _TYPES:
        raise _unknown(name, source, list(_TYPES))


def _unknown(name: str, source: str, known: Sequence[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not nearest:
        key = name.rsplit(".", 1)[-1]
        nearest = [path for path in known if path.rsplit(".", 1)[-1] == key][:1]
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return ConfigError(f"unknown setting {name}{hint}", source=source)


# -- the environment ----------------------------------------------------------------------------------


def _read_environment(draft: _Draft, environ: Mapping[str, str]) -> None:
    draft.warnings += environment.environment_problems(environ)
    for name, variable in SETTING_VARIABLES.items():
        text = environ.get(variable)
        if text is None or (text == "" and _TYPES[name] not in (Text, FilePath)):
            continue
        if environment.is_of_kubernetes(variable, text):
            continue
        try:
            draft.put(name, _from_text(name, text), f"environment {variable}")
        except ConfigError as e:
            if name in STRICT_ENVIRONMENT_KEYS:
                raise ConfigError(f"{variable}: {e.message}", **e.detail) from None
            draft.values.pop(name, None)
            draft.sources[name] = "default"
            draft.warnings.append(f"{variable} is ignored, the default is used: {e}")


# -- values -----------------------------------------------------------------------------------------


def _from_text(name: str, text: str) -> Any:
    """Convert the text of a setting to its value. Raises ConfigError, which names the key."""
    base = getattr(_TYPES[name], "__origin__", _TYPES[name])
    try:
        if base is bool:
            return parse_boolean(text)
        if base in (int, float):
            return _checked(name, _number(name, text, whole=base is int))
    except ValueError as e:
        raise ConfigError(f"{name}: {e}") from None
    return _checked(name, text)


def _number(name: str, text: str, *, whole: bool) -> int | float:
    if name.endswith(("_bytes", "_bytes_per_s")):
        return parse_size(text)
    if name.endswith("_ms"):
        return _whole(parse_duration(text, "ms") * 1000, text) if whole else parse_duration(text, "ms") * 1000
    if name.endswith("_s"):
        return parse_duration(text, "s")
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _whole(number: float, text: str) -> int:
    nearest = round(number)
    if abs(number - nearest) > 1e-6:
        raise ValueError(f"{text!r} is not a whole number of milliseconds")
    return nearest


def _checked(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as e:
        raise ConfigError(f"{name}: {_lower_first(str(e))}", found=value) from None


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
