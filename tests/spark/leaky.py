"""A small source that accepts filters as in Spark's documentation: the control for the filter test.

It is a separate module because Spark's workers import it.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader

ROWS = 100
TESTS = {"LessThan": int.__lt__, "GreaterThanOrEqual": int.__ge__}


class LeakySource(DataSource):
    """Rows 0 to 99, filtered by the predicates that Spark pushes down. It is correct for one scan."""

    @classmethod
    def name(cls):
        return "leaky"

    def schema(self):
        return "i long"

    def reader(self, schema):
        return LeakyReader()


class LeakyReader(DataSourceReader):
    """Stores the pushed filters and returns the rows that pass them."""

    def __init__(self):
        self.filters = []

    def pushFilters(self, filters):
        self.filters = [(type(each).__name__, each.value) for each in filters if type(each).__name__ in TESTS]
        return [each for each in filters if type(each).__name__ not in TESTS]

    def read(self, partition):
        for i in range(ROWS):
            if all(TESTS[name](i, value) for name, value in self.filters):
                yield (i,)
