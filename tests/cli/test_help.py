"""Help texts of every command: complete, in plain words, with examples that parse."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

from ringlog.cli import main
from ringlog.cli.app import build
from ringlog.cli.commands import COMMANDS, Command
from ringlog.cli.outcome import CliExit
from tests.support.command_table import EVERY, resolved

PRONOUNS = re.compile(r"\b(who|whoever|somebody|nobody|one looks|anew|there is no way back)\b", re.I)


def check_text(text: str, where: str) -> None:
    assert text, f"{where} has no help"
    assert text[0].isupper() or text[0].isdigit(), f"{where} begins in lower case: {text}"
    assert text.endswith("."), f"{where} ends without a period: {text}"
    assert not PRONOUNS.search(text), f"{where}: {text}"


@EVERY
def test_the_help_line_of_the_table_is_the_first_line_of_the_docstring(
    words: tuple[str, ...], command: Command
) -> None:
    doc = inspect.getdoc(resolved(words).default_command) or ""
    assert doc.splitlines()[0] == command.help
    check_text(command.help, " ".join(words))


@EVERY
def test_every_parameter_has_a_help_text(words: tuple[str, ...], command: Command) -> None:
    for argument in resolved(words).assemble_argument_collection(parse_docstring=True):
        if argument.show:
            check_text(argument.parameter.help or "", f"{' '.join(words)} {argument.name}")


def test_global_options_and_groups_have_help_texts() -> None:
    app = build()
    for argument in app.meta.assemble_argument_collection(parse_docstring=True):
        if argument.show:
            check_text(argument.parameter.help or "", argument.name)
    for commands in COMMANDS.values():
        for name, command in commands.items():
            check_text(command.help, name)


@pytest.mark.slow
@EVERY
def test_every_example_parses(words: tuple[str, ...], command: Command) -> None:
    heading, *examples = (resolved(words).help_epilogue or "").splitlines()
    assert heading == "Examples:"
    assert examples
    for line in map(str.strip, examples):
        assert line.startswith(f"ringlog {' '.join(words)}"), line
        app = build()
        launch, bound, _ = app.meta.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
        assert launch.__name__ == "launch"
        found, _, _ = app.parse_args(bound.args, exit_on_error=False, print_error=False)
        assert found is resolved(words).default_command


def test_the_top_level_help_lists_every_command_in_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"─ {section} ─") for section in COMMANDS]
    assert places == sorted(places)
    shown = " ".join(printed.replace("│", " ").split())
    for commands in COMMANDS.values():
        for name, command in commands.items():
            assert f" {name} {' '.join(command.help.split())}" in shown
    assert " dead " not in shown.replace("dead letters", "")


@pytest.mark.slow
@EVERY
def test_the_help_of_a_command_has_its_description_options_and_examples(
    words: tuple[str, ...], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert command.help in shown
    assert "Examples: ringlog " in shown
    assert "Global options" in shown


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_both_flags_print_the_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    from ringlog import __version__

    assert main([flag]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["stat"], "status"), (["topic", "lst"], "list"), (["dead-leter", "list", "q"], "dead-letter")],
)
def test_an_unknown_command_exits_2_and_names_the_nearest(
    words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == CliExit.USAGE
    assert f'Did you mean "{nearest}"?' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("router", "get"), ("router", "show")),
        *((("dead", name), ("dead-letter", name)) for name in ("list", "show", "redrive", "purge")),
    ],
)
def test_older_names_still_work_and_are_not_listed(
    old: tuple[str, ...], new: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolved(old).default_command is resolved(new).default_command
    assert main([*new[:-1], "--help"]) == 0
    assert f" {old[-1]} " not in capsys.readouterr().out or old[-1] == new[-1]


@pytest.mark.slow
def test_the_completion_script_knows_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", "--shell", "bash", "--output", "json"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    (script,) = (tmp_path / ".local").rglob("ringlog")
    written = script.read_text()
    for commands in COMMANDS.values():
        for name in commands:
            assert name in written
    assert "--before-seq" in written
