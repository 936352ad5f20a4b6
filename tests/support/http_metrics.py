"""Metrics of the HTTP gateway, as tests read them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return every sample by its name and the values of its labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
