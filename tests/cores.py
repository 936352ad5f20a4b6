"""Which form of the modules the tests run. pytest loads this file before all imports of the modules.

The process of the tests runs the sources, and the engines that it starts run the compiled cores. With
RINGLOG_CORES=1, as in `make test-compiled`, both run compiled. Tests that replace a method or an object of a
compiled class cannot do that, and are skipped.
"""

from __future__ import annotations

import os

import pytest

from ringlog import cores

_IS_COMPILED = os.environ.setdefault(cores.VARIABLE, cores.ACTORS_ONLY) == "1"
if _IS_COMPILED and (why := cores.disabled_reason()):
    raise pytest.UsageError(f"there are no compiled cores: {why}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests with the mark `interpreted` if the process runs compiled."""
    for item in items:
        if _IS_COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="replaces something in a compiled class"))
