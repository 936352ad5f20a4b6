"""`pytest -p tests.compiled`: the engine's pure modules run compiled in the tests, as in its processes.

Named with -p it is loaded ahead of everything that imports one of them. Tests that put something in the place
of a method, or of a topic, cannot do that to compiled classes, and are left out.
"""

from __future__ import annotations

import pytest

from ringlog import cores

if why := cores.use():
    raise pytest.UsageError(f"there are no compiled cores: {why}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is marked."""
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="replaces something in a compiled class"))
