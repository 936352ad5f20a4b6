"""The engine's processes."""
