"""Jobs: what `ringlog spark <job>` runs, each a function `run(session, …)` that returns a report.

archive   topics into Parquet, by topic and date, going on where the last run ended
verify    reads and checks every stored frame; what is damaged, what is missing without a reason
replay    records of topics into other topics; backfill: Parquet into topics
compact   proposes what may be deleted, by tag or age, and deletes it when told to
stats     sizes, rates, tags and lag per topic, from indexes
mirror    a stream of topics into any Spark sink
recover   finishes writes whose driver died

All state their bounds, and run again they do nothing twice. Reports are frozen dataclasses; `facts_of` makes
plain values of them.
"""
