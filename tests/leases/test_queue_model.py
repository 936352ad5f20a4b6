"""A queue compared with a model of one object for each job, which recounts everything after each step."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.support.queue_machine import QueueMachine

pytestmark = pytest.mark.slow

QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueueModel = QueueMachine.TestCase
