"""Delivery of grants: subscriptions, feeds and ready sets."""
