"""Checkpoints of the shards of a World by the compactor's own code, in one thread."""

from __future__ import annotations

from ringlog.testing.checkpoints import Asking, checkpoint, checkpoint_all, workplace

__all__ = ["Asking", "checkpoint", "checkpoint_all", "workplace"]
