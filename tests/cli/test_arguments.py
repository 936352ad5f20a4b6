"""Every number and text of every command: what no command accepts is refused in one line before it runs."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from ringlog.cli import main
from ringlog.cli.app import build
from ringlog.cli.commands import Command
from ringlog.cli.outcome import CliExit
from tests.support.command_table import EVERY, resolved

NOT_UTF8 = "\udcff"
NUMBERS = ["-1", str(1 << 64), "eternal", NOT_UTF8]
ANY = ["0", "-1", str(1 << 64), "9" * 5_000, "eternal"]
POSITIONAL = {"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL"}
LONG = {"serve", "chaos", "metrics", "bench", "spark", "worker"}
"""First words of commands that start an engine or a server, or change this process's log."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without files, and the address of an engine that does not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGLOG_URL", f"ringlog://{tmp_path}/absent")
    monkeypatch.delenv("RINGLOG_CONFIG", raising=False)
    return tmp_path


def kind_of(argument: Any) -> Any:
    """Return int, float, str or bytes for an argument that takes one or several of them; else its type."""
    kinds = [each for each in typing.get_args(argument.hint) if each not in {type(None), Ellipsis}]
    is_simple = typing.get_origin(argument.hint) is typing.Literal or not kinds
    return argument.hint if is_simple else kinds[0]


def arguments_of(words: tuple[str, ...]) -> list[Any]:
    found = resolved(words).assemble_argument_collection(parse_docstring=True)
    return [argument for argument in found if argument.show and argument.hint is not bool]


def line(words: tuple[str, ...], argument: Any, value: str) -> list[str]:
    """Return the command line with this value of one argument, and a plain one of the others it needs."""
    before: list[str] = []
    after: list[str] = []
    for each in arguments_of(words):
        is_positional = each.field_info.kind.name in POSITIONAL
        if each.name == argument.name:
            given = value
        elif each.required:
            given = "1"
        else:
            continue
        # A positional argument that begins with a hyphen would be an option.
        if is_positional:
            before += ["--", given] if given.startswith("-") and "--" not in before else [given]
        else:
            after.append(f"{each.name}={given}")
    return [*words, *after, *before]


def lines(words: tuple[str, ...], values: list[str], kinds: set[Any]) -> Iterator[tuple[str, list[str]]]:
    for argument in arguments_of(words):
        if kind_of(argument) in kinds:
            for value in values:
                yield value, line(words, argument, value)


def refusal(arguments: list[str]) -> str:
    """Parse the arguments without running the command. Return the error, or an empty text."""
    try:
        build().parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as e:
        return str(e)
    return ""


@EVERY
def test_a_number_that_no_message_has_a_place_for_is_wrong_usage(
    words: tuple[str, ...], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process is started and nothing is sent, so this runs for every command."""
    for value, arguments in lines(words, NUMBERS, {int, float}):
        assert main(arguments) == CliExit.USAGE, (arguments, value)
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1, printed.err


@EVERY
def test_zero_is_a_number_or_wrong_usage(words: tuple[str, ...], command: Command) -> None:
    for _, arguments in lines(words, ["0"], {int, float}):
        said = refusal(arguments)
        assert not said or "must be from" in said, arguments


@EVERY
def test_text_that_is_not_utf8_is_wrong_usage(
    words: tuple[str, ...], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except for the contents of records, which are bytes, and the names of files to read."""
    accepted = {("put", "DATA"), ("put", "--key"), ("write", "FILES")}
    for argument in arguments_of(words):
        if kind_of(argument) not in {str, bytes}:
            continue
        arguments = line(words, argument, f"a={NOT_UTF8}")
        if (words[-1], argument.name) in accepted:
            assert refusal(arguments) == ""
        else:
            assert main(arguments) == CliExit.USAGE, arguments
            assert "UTF-8" in capsys.readouterr().err, arguments


@pytest.mark.slow
@EVERY
def test_no_argument_is_an_internal_error(
    words: tuple[str, ...], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] in LONG:
        return
    flags = [each.name for each in resolved(words).assemble_argument_collection() if each.hint is bool]
    confirmed = [name for name in flags if name == "--yes"]
    for _, arguments in lines(words, ANY, {int, float, str, bytes}):
        code = main([*arguments[: len(words)], *confirmed, *arguments[len(words) :]])
        printed = capsys.readouterr()
        assert "error: internal" not in printed.err, (arguments, printed.err)
        assert code != CliExit.USAGE or len(printed.err.splitlines()) == 1, (arguments, printed.err)


@pytest.mark.parametrize("name", ["--url", "--key-file", "--timeout", "--output"])
def test_a_wrong_global_option_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ANY:
        code = main(["topic", "list", f"{name}={value}"])
        assert "error: internal" not in capsys.readouterr().err
        assert code in {CliExit.USAGE, CliExit.NO_CONNECTION, CliExit.FAILED}, value
    assert main(["topic", "list", f"{name}={NOT_UTF8}"]) == CliExit.USAGE
