"""What tasks find in their process, and what processes that run no task keep as it was."""

from __future__ import annotations

import gc

import pytest

from ringlog.spark.workers import freeze_imports


def test_the_collector_of_a_process_without_tasks_is_left_alone():
    before = gc.get_freeze_count()
    freeze_imports("read")
    assert gc.get_freeze_count() == before


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_a_worker_keeps_its_imports_out_of_the_collections_behind_its_tasks(spark):
    def frozen_objects(_):  # Inside, so that it travels by value: workers cannot import this module.
        freeze_imports("read")
        once = gc.get_freeze_count()
        kept = [[] for _ in range(100)]
        freeze_imports("read")
        return once, gc.get_freeze_count() - once, len(kept)

    for frozen, later, _ in spark.sparkContext.parallelize(range(2), 2).map(frozen_objects).collect():
        assert frozen > 10_000
        assert later <= 0, "what a task makes is garbage later, and is to be collected"
