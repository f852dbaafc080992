"""Log of a federation without rounds: who started from which version, and whose messages arrived in which order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fedbayes.core.errors import FederationError, is_whole


class Fusion(NamedTuple):
    """Fusion as the log tells it, in one line of JSON.

    Args:
        clients: number of clients that were connected, of whom each has the share 1 / clients.
        began: clients that began from the global posterior before it.
        arrived: (client, version) of the messages that were admitted, in their order; version v is the global posterior
            after v fusions.
        refused: clients that failed, or whose messages came too late or could not be used.
    """

    clients: int
    began: tuple[int, ...]
    arrived: tuple[tuple[int, int], ...]
    refused: tuple[int, ...] = ()

    def line(self, number: int) -> str:
        """Return the line of fusion ``number``, from 1."""
        return json.dumps({"fusion": number, **self._asdict()}) + "\n"


def read_arrivals(path: Path) -> list[Fusion]:
    """Return the fusions of a log; a last line that was cut off is left out.

    Raises:
        FederationError: there is no such file, or it is no such log.
    """
    try:
        *lines, _ = path.read_text().split("\n")  # what follows the last line's end was cut off
        fusions = [_fusion(json.loads(line), number) for number, line in enumerate(lines, 1)]
        heard: dict[int, int] = {}
        for number, fusion in enumerate(fusions, 1):
            for client, version in fusion.arrived:
                if version < heard.get(client, 0):
                    raise ValueError(f"in line {number} client {client} has begun before it was heard")
                heard[client] = number
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FederationError(
            f"{path} is no log of arrivals: {type(error).__name__}: {error}; give the file beside the checkpoint of a "
            "FusionStrategy(schedule=...)"
        ) from error
    return fusions


def _fusion(line: dict[str, Any], number: int) -> Fusion:
    """Return the fusion of a line; raise ValueError for what it cannot be."""
    arrived = tuple((client, version) for client, version in line["arrived"])
    began, refused = tuple(line["began"]), tuple(line["refused"])
    numbers = (line["clients"], *began, *refused, *(each for pair in arrived for each in pair))
    late = all(version < number for _, version in arrived)
    if line["fusion"] != number or not late or not all(is_whole(each) and each >= 0 for each in numbers):
        raise ValueError(f"line {number} is no fusion {number}")
    return Fusion(line["clients"], began, arrived, refused)
