"""Compile native/kernel.c where there is a compiler. Without one the package is whole, and slower.

RINGLOG_BUILD_KERNEL=0 leaves it out, =1 makes its failing an error (for whoever builds wheels).
RINGLOG_BUILD_CORES=1 has a wheel hold compiled cores as well (compile_cores.py); a checkout compiles its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORES = "ringlog/_cores"
SOURCE = "native/kernel.c"
TARGET = "ringlog/_kernel.abi3.so"
FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Werror=implicit-function-declaration",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)
COMPILE_S = 300


class KernelHook(BuildHookInterface[Any]):
    """Runs before a wheel, and an editable one, is put together."""

    def dependencies(self) -> list[str]:
        """What cores are compiled with, and what their types are known from."""
        if os.environ.get("RINGLOG_BUILD_CORES") != "1":
            return []
        return [
            "mypy>=2.4,<3",
            "setuptools>=84,<85",
            "msgspec>=0.22,<0.23",
            "numpy>=2.2,<3",
            "pyzmq>=27,<28",
            "xxhash>=4.1,<5",
        ]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the library and have the wheel hold it."""
        wish = os.environ.get("RINGLOG_BUILD_KERNEL", "")
        root = Path(self.root)
        if self.target_name != "wheel":
            return
        if wish == "0":
            if version == "editable":
                (root / TARGET).unlink(missing_ok=True)
            return
        failure = compile_kernel(root)
        if failure:
            (root / TARGET).unlink(missing_ok=True)
            if wish == "1":
                raise SystemExit(f"the kernel cannot be compiled: {failure}")
            self.app.display_warning(f"ringlog is built without its compiled kernel: {failure}")
            return
        build_data["artifacts"].append(TARGET)
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
    """Compile it beside the package; returns why that failed, or nothing."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        return f"no compiler ({compiler[0]})"
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        return f"no Python.h in {include}"
    made = root / f"{TARGET}.{os.getpid()}"
    command = [*compiler, *FLAGS, f"-I{include}", str(root / SOURCE), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        return done.stderr.strip()[-1_000:]
    # In one step: a process that has the old one mapped keeps it.
    made.replace(root / TARGET)
    return ""
