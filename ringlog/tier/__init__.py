"""The cold tier: a second place for segments that the host's own disk does not keep."""
