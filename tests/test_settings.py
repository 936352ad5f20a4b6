"""Settings: precedence of sources, refused values, and messages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog import config as c
from ringlog import environment
from ringlog.cli.app import run
from ringlog.cli.outcome import CliExit
from ringlog.client.requests.topic_settings import TopicSettings
from ringlog.config_sources import LoadedConfig, load_config, parse_flags
from ringlog.errors import ConfigError
from ringlog.limits import COUNT_MAX, DURATION_MS_MAX, INTERVAL_S_MIN
from ringlog.quantities import parse_size
from ringlog.settings import FLAG, NAME, TOPIC_SETTINGS, WHOLE, WORD, Setting
from ringlog.types import Durability


def load(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: str) -> LoadedConfig:
    (tmp_path / "ringlog.toml").write_text(text)
    return load_config({k.replace("__", "."): v for k, v in flags.items()}, environ or {}, str(tmp_path))


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    text, env = "[wal]\nshards = 2\n", {"RINGLOG_WAL_SHARDS": "3"}
    by_default = load(tmp_path)
    assert by_default.config.wal.shards >= 1
    assert by_default.sources["wal.shards"] == "default"
    by_file = load(tmp_path, text)
    assert (by_file.config.wal.shards, by_file.sources["wal.shards"]) == (2, f"file {tmp_path}/ringlog.toml")
    by_env = load(tmp_path, text, env)
    assert (by_env.config.wal.shards, by_env.sources["wal.shards"]) == (3, "environment RINGLOG_WAL_SHARDS")
    by_flag = load(tmp_path, text, env, wal__shards="4")
    assert (by_flag.config.wal.shards, by_flag.sources["wal.shards"]) == (4, "flag")


@pytest.mark.parametrize("text", ["[wal]\nshard = 2\n", "[wall]\nshards = 2\n"])
def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_known_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean wal") as caught:
        load(tmp_path, text)
    assert "ringlog.toml" in str(caught.value)


def test_an_unknown_flag_is_refused_with_the_nearest_known_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting wal\.shrds; did you mean wal\.shards\?"):
        load(tmp_path, wal__shrds="2")
    with pytest.raises(ConfigError, match=r"did you mean supervisor\.drain_s\?"):
        load(tmp_path, drain_s="2")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("wal.shards", "0"),
        ("wal.shards", "65"),
        ("wal.shards", "two"),
        ("run.ring_bytes", "1KiB"),
        ("run.ring_bytes", "64 bananas"),
        ("wal.corruption", "ignore"),
        ("wal.flush_interval_ms", "0.5ms"),
        ("gateway.enabled", "maybe"),
        ("supervisor.stuck_after_s", "0"),
        ("limits.max_record_bytes", "65MiB"),
        ("data.dir", ""),
    ],
)
def test_a_wrong_value_of_a_flag_or_the_file_is_refused_with_its_key(
    tmp_path: Path, key: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config({key: value}, {}, str(tmp_path))
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(tmp_path, f'[{section}]\n{name} = "{value}"\n')


def test_a_wrong_type_in_the_file_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wal\.shards: expected `int`"):
        load(tmp_path, "[wal]\nshards = [1]\n")
    with pytest.raises(ConfigError, match=r"gateway\.enabled: expected `bool`"):
        load(tmp_path, "[gateway]\nenabled = 1\n")
    with pytest.raises(ConfigError, match="wal must be a table"):
        load(tmp_path, "wal = 3\n")


def test_an_invalid_variable_gives_a_warning_and_the_default(tmp_path: Path) -> None:
    """The same holds for values out of range, and for the shard count 0."""
    for text in ("many", "0", "-1", "1e9"):
        loaded = load(tmp_path, environ={"RINGLOG_WAL_SHARDS": text})
        assert loaded.config.wal.shards == c.WalConfig().shards
        assert loaded.sources["wal.shards"] == "default"
        assert len(loaded.warnings) == 1
        assert "RINGLOG_WAL_SHARDS" in loaded.warnings[0]


def test_an_invalid_variable_that_grants_rights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RINGLOG_ALLOW_ROOT"):
        load(tmp_path, environ={"RINGLOG_ALLOW_ROOT": "perhaps"})


def test_the_file_is_found_by_flag_then_variable_then_working_directory(tmp_path: Path) -> None:
    for n, name in enumerate(("flag.toml", "env.toml", "ringlog.toml"), start=1):
        (tmp_path / name).write_text(f"[wal]\nshards = {n}\n")
    cwd, env = str(tmp_path), {"RINGLOG_CONFIG": "env.toml"}
    assert load_config({}, env, cwd, config_file="flag.toml").config.wal.shards == 1
    assert load_config({}, env, cwd).config.wal.shards == 2
    assert load_config({}, {}, cwd).config.wal.shards == 3


def test_a_named_file_must_exist_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({}, {}, str(tmp_path), config_file="absent.toml")
    (tmp_path / "bad.toml").write_bytes(b"[wal\n\xff")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config({}, {}, str(tmp_path), config_file="bad.toml")


def test_sizes_and_durations_accept_units(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, '[run]\nring_bytes = "4MiB"\n[wal]\nflush_interval_ms = "2s"\n', supervisor__drain_s="500ms"
    )
    assert loaded.config.run.ring_bytes == 4 << 20
    assert loaded.config.wal.flush_interval_ms == 2000
    assert loaded.config.supervisor.drain_s == 0.5


def test_paths_become_absolute_and_run_dir_defaults_to_the_data_directory(tmp_path: Path) -> None:
    loaded = load(tmp_path, data__dir="here")
    assert loaded.config.data.dir == str(tmp_path / "here")
    assert loaded.config.run.dir == str(tmp_path / "here" / "run")
    assert load(tmp_path, run__dir="there").config.run.dir == str(tmp_path / "there")


PATHS = [
    f"{section}.{key}"
    for section, struct in get_type_hints(c.Config).items()
    if section != "topics"
    for key, kind in get_type_hints(struct, include_extras=True).items()
    if c.is_path(kind)
]


@pytest.mark.parametrize("key", PATHS)
def test_every_path_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The engine's processes work in `/`, and none of them expands `~`."""
    monkeypatch.setenv("HOME", "/home/user")
    section, name = key.split(".")
    for text, found in [
        ("sub/x", f"{tmp_path}/sub/x"), ("~/x", "/home/user/x"), ("/a/../b", "/b"),
    ]:  # fmt: skip
        loaded = load_config({key: text}, {}, str(tmp_path))
        assert getattr(getattr(loaded.config, section), name) == found


def test_settings_that_name_files_have_the_type_of_paths() -> None:
    named = {key for key in environment.SETTING_VARIABLES if re.search(r"(\.|_)(dir|file|path)$", key)}
    assert named == set(PATHS)


def test_topics_are_tables_of_the_file_and_keep_their_source(tmp_path: Path) -> None:
    loaded = load(tmp_path, '[topics."a.b"]\ncap_records = 5\n')
    assert loaded.config.topics == {"a.b": {"cap_records": 5}}
    assert ('topics."a.b"', {"cap_records": 5}, f"file {tmp_path}/ringlog.toml") in loaded.rows()
    with pytest.raises(ConfigError, match="must be a table"):
        load(tmp_path, "[topics]\nx = 1\n")
    with pytest.raises(ConfigError, match="topics are configured in the file"):
        load(tmp_path, topics__x="1")


def test_every_value_is_shown_with_its_source(tmp_path: Path) -> None:
    rows = load(tmp_path, wal__shards="2").rows()
    assert {key for key, _, _ in rows} == set(environment.SETTING_VARIABLES)
    assert ("wal.shards", 2, "flag") in rows


def test_the_configuration_survives_serialisation_for_an_actor(tmp_path: Path) -> None:
    config = load(tmp_path, "[topics.t]\nttl_ms = 1\n", wal__shards="5").config
    assert c.from_plain(c.to_plain(config)) == config
    with pytest.raises(ConfigError, match="shards"):
        c.from_plain({"wal": {"shards": "x"}})


@pytest.mark.parametrize("value", ["~user\0", "/x\0y", "\0"])
def test_a_nul_character_in_a_path_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"cold\.dir must not contain a NUL character"):
        load(tmp_path, cold__dir=value)


def test_a_set_argument_without_a_value_is_refused() -> None:
    assert parse_flags(["wal.shards=2", "log.level=info,a=debug"]) == {
        "wal.shards": "2",
        "log.level": "info,a=debug",
    }
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_flags(["wal.shards"])


@given(st.integers(min_value=0, max_value=1 << 50), st.sampled_from(["", "B", "KiB", "MiB", "KB", "MB"]))
def test_a_size_is_number_times_unit(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "KB": 10**3, "MB": 10**6}[unit]
    assert parse_size(f"{number}{unit}") == number * factor


@given(st.text(max_size=12))
def test_any_text_gives_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert size >= 0


# -- unknown variables -----------------------------------------------------------------------------------


def test_a_mistyped_variable_gives_a_warning_with_the_nearest_name(tmp_path: Path) -> None:
    loaded = load(tmp_path, environ={"RINGLOG_WAL_SHARD": "4", "RINGLOG_URI": "x", "RINGLOG_QQQQ": "1"})
    assert [each.partition(" ")[0] for each in loaded.warnings] == [
        "RINGLOG_QQQQ", "RINGLOG_URI", "RINGLOG_WAL_SHARD",
    ]  # fmt: skip
    assert "did you mean" not in loaded.warnings[0]
    assert loaded.warnings[1].endswith("did you mean RINGLOG_URL?")
    assert loaded.warnings[2].endswith("did you mean RINGLOG_WAL_SHARDS?")


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("RINGLOG_TIMEOUT_MS", "soon", "500"), ("RINGLOG_SPARK_JVM", "maybe", "1"),
     ("RINGLOG_BENCH_SCALE", "-1", "0.5")],
)  # fmt: skip
def test_an_invalid_value_of_any_variable_gives_a_warning(
    tmp_path: Path, name: str, wrong: str, right: str
) -> None:
    (warning,) = load(tmp_path, environ={name: wrong}).warnings
    assert warning.startswith(f"{name} must be ")
    assert repr(wrong) in warning
    assert not load(tmp_path, environ={name: right}).warnings


def test_kubernetes_service_variables_give_no_warning(tmp_path: Path) -> None:
    names = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_TCP",
        "PORT",
        "PORT_7000_TCP",
        "PORT_7000_TCP_ADDR",
    )
    assert not load(tmp_path, environ={f"RINGLOG_{name}": "tcp://10.0.0.1:7000" for name in names}).warnings


def test_config_check_fails_on_an_unknown_variable(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RINGLOG_")]:
        monkeypatch.delenv(name)
    assert run(["config", "check"]) == CliExit.DONE
    monkeypatch.setenv("RINGLOG_WAL_SHARD", "4")
    assert run(["config", "check"]) == CliExit.USAGE
    assert "did you mean RINGLOG_WAL_SHARDS?" in capsys.readouterr().err


def test_every_variable_in_the_code_is_in_the_table() -> None:
    known = {*environment.VARIABLES, *environment.SETTING_VARIABLES.values()}
    root = Path(c.__file__).parent.parent
    read = {
        name: str(path)
        for top in ("ringlog", "actors", "bench", "chaos", "demo", "pyspark_ringlog", ".")
        for path in (root.glob("*.py") if top == "." else (root / top).rglob("*.py"))
        for name in re.findall(r"""["'](RINGLOG_[A-Z0-9_]+)["']""", path.read_text())
    }
    assert len(read) > 40
    assert {name: path for name, path in read.items() if name not in known} == {}


EXTREMES = [
    "0", "-1", "1", str(2**63), str(2**64 - 1), "9" * 400, "nan", "inf", "1e400", "0.0000001", "", "x",
]  # fmt: skip


def loaded_or_refused(key: str, text: str, cwd: str) -> tuple[LoadedConfig | None, str]:
    try:
        return load_config({key: text}, {}, cwd), ""
    except ConfigError as e:
        return None, str(e)


@pytest.mark.parametrize("key", sorted(environment.SETTING_VARIABLES))
def test_an_extreme_value_of_any_setting_is_refused_or_bounded(tmp_path: Path, key: str) -> None:
    for text in EXTREMES:
        loaded, refusal = loaded_or_refused(key, text, str(tmp_path))
        if loaded is None:
            assert key in refusal
            continue
        section, name = key.split(".")
        value = getattr(getattr(loaded.config, section), name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert abs(value) <= COUNT_MAX
            assert value == 0 or value >= INTERVAL_S_MIN or name in {"compression_saving", "drain_s"}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "true", str(2**63 - 1), "-1", "[]", "{}"])
@pytest.mark.parametrize("key", ["cold.interval_s", "storage.segment_age_ms", "supervisor.restart_window_s"])
def test_an_extreme_value_in_the_file_is_refused_with_its_name(tmp_path: Path, key: str, value: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=name):
        load(tmp_path, f"[{section}]\n{name} = {value}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('durabilty = "fsync"', "did you mean durability"),
        ("ttl = 5", "has no setting 'ttl'"),
        ("ttl_ms = 18446744073709551615", f"from 0 to {DURATION_MS_MAX} ms"),
        ('ttl_ms = "1h"', "ttl_ms must be an integer"),
        ("lease_ms = 1", "from 100 to 86400000 ms"),
        ("priority_levels = 3000", "priority_levels has no effect|from 1 to 256"),
        ('type = "heap"', "type must be one of log, queue, got 'heap'"),
        ("max_deliveries = 3", "max_deliveries has no effect on a log"),
        ("auto_create = false", "auto_create has no effect here"),
        ('type = "queue"\ndead_letter = "a b"', "invalid topic name"),
    ],
)
def test_a_wrong_setting_of_a_topic_in_the_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, f"[topics.orders]\n{text}\n")
    assert 'topics."orders"' in str(caught.value)
    assert "ringlog.toml" in str(caught.value)


def test_a_topic_of_the_file_has_a_legal_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="invalid topic name"):
        load(tmp_path, '[topics."../x"]\nttl_ms = 5\n')


def annotation_of(row: Setting) -> set[object]:
    """Return the types of a row of the table, as `TopicSettings` declares them."""
    kinds: dict[str, set[object]] = {WHOLE: {int}, FLAG: {bool}, NAME: {str}, WORD: set(row.words)}
    return kinds[row.kind] | ({NoneType} if row.is_nullable else set())


def test_topic_settings_for_type_checkers_match_the_table():
    hints = get_type_hints(TopicSettings)
    assert list(hints) == list(TOPIC_SETTINGS)
    for name, hint in hints.items():
        parts = get_args(hint) or (hint,)
        flat = {word for part in parts for word in get_args(part) or (part,)} - {Durability}
        assert flat == annotation_of(TOPIC_SETTINGS[name]), name
