"""Turns received frames into commit batches."""
