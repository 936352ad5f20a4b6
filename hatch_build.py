"""Compile native/kernel.c, which ringlog cannot do without; a C compiler and Python's headers are needed.

RINGLOG_BUILD_CORES=1 has a wheel hold compiled cores as well (compile_cores.py); a checkout compiles its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORES = "ringlog/_cores"
SOURCE = "native/kernel.c"
TARGET = "ringlog"
NAME = "_kernel"
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


class KernelHook(BuildHookInterface[Any]):
    """Runs before a wheel, and an editable one, is put together."""

    def dependencies(self) -> list[str]:
        """What cores are compiled with, and what their types are known from."""
        if os.environ.get("RINGLOG_BUILD_CORES") != "1":
            return []
        return ["mypy>=2.4,<3", "msgspec>=0.22,<0.23", "numpy>=2.2,<3", "pyzmq>=27,<28", "xxhash>=4.1,<5"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the library and have the wheel hold it."""
        root = Path(self.root)
        if self.target_name != "wheel":
            return
        build_data["artifacts"].append(compile_kernel(root))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"
        if version == "standard" and os.environ.get("RINGLOG_BUILD_CORES") == "1":
            self._build_cores(root)
            build_data["artifacts"].append(f"{CORES}/**")
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            build_data["tag"] = f"{python}-{python}-{platform}"

    @staticmethod
    def _build_cores(root: Path) -> None:
        sys.path.insert(0, str(root))
        from compile_cores import compile_cores

        failure = compile_cores(root)
        if failure:
            raise SystemExit(f"the cores cannot be compiled: {failure}")


def compile_kernel(root: Path) -> str:
    """Compile it with the platform's C compiler beside the package; returns its path below `root`.

    Raises SystemExit, with what the compiler found, where that fails.
    """
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import BaseError

    flags = MSVC_FLAGS if sys.platform == "win32" else GNU_FLAGS
    extension = Extension(NAME, [str(root / SOURCE)], extra_compile_args=list(flags), py_limited_api=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = build_ext(Distribution({"name": "ringlog", "ext_modules": [extension]}))
        command.build_lib = command.build_temp = scratch
        try:
            command.ensure_finalized()
            command.run()
        except BaseError as e:
            raise SystemExit(
                f"ringlog's kernel (native/kernel.c) cannot be compiled: {e}\n"
                "Install a C compiler and the headers of this Python, or install a wheel for this platform."
            ) from None
        [made] = Path(scratch).glob(f"{NAME}.*")
        target = root / TARGET / made.name
        # In one step: a process that has the old one mapped keeps it.
        beside = target.with_name(f"{made.name}.{os.getpid()}")
        shutil.copyfile(made, beside)
        beside.replace(target)
    return f"{TARGET}/{made.name}"
