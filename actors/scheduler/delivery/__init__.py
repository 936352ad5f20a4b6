"""Subscriptions, and who is granted what to read."""
