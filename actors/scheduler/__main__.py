"""`python -m ringlog.actors.scheduler <boot>`: entry point for the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.scheduler.shell import SchedulerShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> SchedulerShell:
    """Create the scheduler that `boot` describes."""
    settings = config.from_plain(boot.config)
    return SchedulerShell(
        boot, schedulers=settings.delivery.schedulers, routers_max=settings.limits.max_routers,
        is_governed=settings.governor.enabled, record_bytes=settings.limits.max_record_bytes,
    )  # fmt: skip


if __name__ == "__main__":
    main(build)
