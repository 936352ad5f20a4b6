"""Jobs of `ringlog spark <job>`. Each module has a function `run(session, …)` that returns a report.

archive   append topics to Parquet files, by topic and date, from the end of the previous run
verify    read and check every stored frame; report damage and unexplained missing records
replay    copy records of topics to other topics
backfill  write Parquet files to topics
compact   list records to delete, by tag or age, and delete them on request
stats     sizes, rates, tags and lag per topic, from indexes
mirror    stream topics to any Spark sink
recover   finish writes whose driver died
discard   give up one such write that cannot be finished

Reports contain the bounds of a run. Repeated runs are idempotent. Reports are frozen dataclasses; `facts_of`
converts them to plain values.
"""
