"""The supervisor: which processes there are, who restarts when, who owns shared memory."""
