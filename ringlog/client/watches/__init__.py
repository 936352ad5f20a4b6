"""Watches over many topics."""
