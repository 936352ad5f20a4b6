"""Systems that the engine is measured beside: how each is installed, started and used from Python."""
