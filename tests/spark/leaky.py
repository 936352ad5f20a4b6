"""A toy source that takes filters, as Spark's documentation shows it: the control group of SK-6.

In a module of its own, since Spark's workers import it.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader

ROWS = 100
TESTS = {"LessThan": int.__lt__, "GreaterThanOrEqual": int.__ge__}


class LeakySource(DataSource):
    """Rows 0..99, filtered by what Spark pushes down: right for one scan."""

    @classmethod
    def name(cls):
        return "leaky"

    def schema(self):
        return "i long"

    def reader(self, schema):
        return LeakyReader()


class LeakyReader(DataSourceReader):
    """Keeps what it is told, and tells the rows that pass."""

    def __init__(self):
        self.filters = []

    def pushFilters(self, filters):
        self.filters = [(type(each).__name__, each.value) for each in filters if type(each).__name__ in TESTS]
        return [each for each in filters if type(each).__name__ not in TESTS]

    def read(self, partition):
        for i in range(ROWS):
            if all(TESTS[name](i, value) for name, value in self.filters):
                yield (i,)
