"""Build what is not Python: the C kernel, and the modules of engine and client that mypyc compiles.

A wheel has each compiled module beside its source. An editable install (`pip install -e .`) compiles the
kernel alone and runs the sources, so that a changed source takes effect. `[tool.ringlog.compiled]` in
pyproject.toml lists the modules.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

BUILD = Path("build/mypyc")
COMPILING_COMMANDS = frozenset({"bdist_wheel", "build", "build_ext", "install"})
"""Commands that make something to install. Others (metadata, sdist, editable) must not wait for mypyc."""
GNU_FLAGS = (
    "-O3",
    "-std=c11",
    "-g0",
    "-fvisibility=hidden",
    "-Werror=implicit-function-declaration",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)
MSVC_FLAGS = ("/O2", "/std:c11")


def kernel() -> Extension:
    """The work per frame. It uses the stable ABI of Python 3.11."""
    flags = MSVC_FLAGS if sys.platform == "win32" else GNU_FLAGS
    return Extension(
        "ringlog._kernel", ["native/kernel.c"], depends=["native/xxhash.h"], extra_compile_args=list(flags),
        py_limited_api=True,
    )  # fmt: skip


def module_files(patterns: list[str]) -> list[str]:
    """Return the files of one library, without packages' `__init__.py` and modules that define stored shapes.

    msgspec reads the annotations of those, and compiled classes have fewer.
    """
    found = {str(path) for pattern in patterns for path in Path().glob(pattern)}
    return sorted(
        file
        for file in found
        if not file.endswith("__init__.py") and "(msgspec.Struct" not in Path(file).read_text()
    )


def libraries() -> dict[str, list[str]]:
    """Return the files of each library, by its name. The working directory is the root of the project."""
    groups = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["ringlog"]["compiled"]
    return {f"ringlog._{name}": module_files(patterns) for name, patterns in groups.items()}


def compiled_modules() -> list[Any]:
    """Translate the listed modules to C; raises SystemExit where mypy finds an error."""
    from mypyc.build import mypycify

    # mypyc 2.4 cannot continue from a cache of an earlier build ("value is not in list").
    shutil.rmtree(BUILD / "mypy", ignore_errors=True)
    options = ["--ignore-missing-imports", "--no-warn-unused-ignores", f"--cache-dir={BUILD / 'mypy'}"]
    return list(
        mypycify(
            [*options, *(file for files in libraries().values() for file in files)],
            opt_level="1",
            debug_level="0",
            target_dir=str(BUILD),
            separate=[(files, name) for name, files in libraries().items()],
        )
    )


def index_page() -> str:
    """Return the README for the page of an index, where links to files of the checkout lead nowhere."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", Path("README.md").read_text())


if __name__ == "__main__":
    setup(
        long_description=index_page(),
        long_description_content_type="text/markdown",
        ext_modules=[kernel(), *(compiled_modules() if COMPILING_COMMANDS & set(sys.argv) else [])],
        options={"build_ext": {"parallel": os.cpu_count() or 1}},
    )
