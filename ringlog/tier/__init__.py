"""The cold tier: where sealed segments lie that the host's own disk does not keep."""
