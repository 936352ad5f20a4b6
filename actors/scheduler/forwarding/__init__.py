"""Routers and dead letters: records copied from topic to topic."""
