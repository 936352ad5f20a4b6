"""The garbage collector in processes with tasks, and in processes without."""

from __future__ import annotations

import gc

import pytest

from ringlog.spark.workers import freeze_imports


def test_freeze_imports_does_nothing_in_a_process_without_tasks():
    before = gc.get_freeze_count()
    freeze_imports("read")
    assert gc.get_freeze_count() == before


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_a_worker_excludes_its_imports_from_garbage_collection(spark):
    def frozen_objects(_):  # nested, so that it is pickled by value: workers cannot import this module
        freeze_imports("read")
        once = gc.get_freeze_count()
        kept = [[] for _ in range(100)]
        freeze_imports("read")
        return once, gc.get_freeze_count() - once, len(kept)

    for frozen, later, _ in spark.sparkContext.parallelize(range(2), 2).map(frozen_objects).collect():
        assert frozen > 10_000
        assert later <= 0, "what a task makes is garbage later, and is to be collected"
