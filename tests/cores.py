"""Which form of our modules tests run; loaded by pytest ahead of everything that imports one of them.

The tests' own process runs the sources, engines that it starts run what was compiled of them. With
RINGLOG_CORES=1, as `make test-compiled` says, both run compiled: tests that put something in the place of a
method, or of an object, cannot do that to compiled classes, and are left out.
"""

from __future__ import annotations

import os

import pytest

from ringlog import cores

_IS_COMPILED = os.environ.setdefault(cores.VARIABLE, cores.ACTORS_ONLY) == "1"
if _IS_COMPILED and (why := cores.disabled_reason()):
    raise pytest.UsageError(f"there are no compiled cores: {why}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is marked."""
    for item in items:
        if _IS_COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="replaces something in a compiled class"))
