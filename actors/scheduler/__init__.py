"""The scheduler: gives watches grants to read, runs routers and moves dead letters."""
