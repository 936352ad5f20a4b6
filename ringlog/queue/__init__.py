"""Queues: who works on which job, and until when. Pure; what a shard keeps beside the log."""
