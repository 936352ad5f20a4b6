"""What every class of the harness notes its work in."""

from __future__ import annotations

import pytest

from chaos.order import Account


@pytest.fixture
def account() -> Account:
    """An empty account."""
    return Account()
