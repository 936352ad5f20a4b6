"""Entry point `python -m ringlog.actors.wal_shard <boot>`, started by the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.wal_shard.commit.admission import AdmissionLimits
from ringlog.actors.wal_shard.core import Settings
from ringlog.actors.wal_shard.shell import WalShardShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> WalShardShell:
    """Create the shard that `boot` describes."""
    settings = config.from_plain(boot.config)
    limits = AdmissionLimits(
        batch_records=settings.limits.max_batch_records,
        record_bytes=settings.limits.max_record_bytes,
        flush_interval_us=settings.wal.flush_interval_ms * 1_000,
        total_bytes=settings.limits.max_total_bytes,
    )
    return WalShardShell(
        boot,
        Settings(settings.wal.flush_interval_ms, limits),
        file_bytes=settings.wal.file_bytes,
        volatile_bytes=settings.wal.volatile_bytes,
        is_lenient=settings.wal.corruption == "truncate",
        topics_max=settings.limits.max_topics,
        schedulers=settings.delivery.schedulers,
        has_cold=bool(settings.cold.dir or settings.cold.url),
        is_governed=settings.governor.enabled,
    )


if __name__ == "__main__":
    main(build)
