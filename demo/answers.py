"""Expected answers of Spark: departure delays by carrier and hour, computed by pandas from the source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from demo.source import data_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

Delays = dict[tuple[str, int], tuple[int, int, int]]
"""(carrier, scheduled hour) -> (flights, departed flights, their total departure delay in minutes)."""
FIELDS = "carrier STRING, hour INT, dep_delay DOUBLE"
"""Used fields of an event, as a schema for Spark's from_json. Delays are whole minutes, written as 2.0."""


def delays(limit: int | None) -> Delays:
    """Return the expected answer for the first `limit` flights, or for all."""
    import pandas

    flights = pandas.read_csv(data_file(), nrows=limit, usecols=["carrier", "hour", "dep_delay"])
    found = flights.groupby(["carrier", "hour"])["dep_delay"].agg(["size", "count", "sum"])
    return {
        (str(carrier), int(hour)): (int(size), int(count), int(total))
        for (carrier, hour), size, count, total in found.itertuples()
    }


def by_carrier(answer: Delays) -> dict[str, tuple[int, int, int]]:
    """Sum the answer over all hours."""
    sums: dict[str, tuple[int, int, int]] = {}
    for (carrier, _), row in answer.items():
        before = sums.get(carrier, (0, 0, 0))
        sums[carrier] = (before[0] + row[0], before[1] + row[1], before[2] + row[2])
    return sums


def wrong(found: Mapping[object, object], wanted: Mapping[object, object]) -> int:
    """Return the number of rows that differ, are missing, or are extra."""
    return sum(found.get(key) != wanted.get(key) for key in {*found, *wanted})


def draw(answer: Delays, path: Path) -> None:
    """Draw the mean delay in minutes: carriers down, hours across."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    carriers = sorted({carrier for carrier, _ in answer})
    hours = sorted({hour for _, hour in answer})
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    image = axes.imshow(_means(answer, carriers, hours), aspect="auto", cmap="magma", vmin=0, vmax=60)
    axes.set_xticks(range(len(hours)), [str(hour) for hour in hours])
    axes.set_yticks(range(len(carriers)), carriers)
    axes.set(xlabel="scheduled hour of departure", ylabel="carrier", title="Mean departure delay, minutes")
    figure.colorbar(image, extend="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _means(answer: Delays, carriers: list[str], hours: list[int]) -> NDArray[object]:
    """Return (carriers, hours) mean minutes; NaN, drawn as blank, where no flight departed."""
    import numpy as np

    means = np.full((len(carriers), len(hours)), np.nan)
    for (carrier, hour), (_, departed, minutes) in answer.items():
        if departed:
            means[carriers.index(carrier), hours.index(hour)] = minutes / departed
    return means
