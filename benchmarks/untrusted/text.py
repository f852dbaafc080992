"""The plays of Shakespeare, dealt out by roles."""

from __future__ import annotations

import html
import random
import re
import tarfile
from pathlib import Path

import torch
from federation import Examples
from torch import Tensor

SPEAKER_OR_LINE = re.compile(r'<a name="?(?:speech\d+"?><b>(.*?)</b>|[\d.]+"?>(.*?)</a>)', re.IGNORECASE | re.DOTALL)
LEAST_CHARACTERS = 1000
"""Of a role that counts."""


def roles(directory: Path) -> list[str]:
    """What every role of the plays says, one text per role of at least 1,000 characters.

    Args:
        directory: holds ``html.tar.xz``, an archive of the plays in HTML, one file each.
    """
    said: dict[tuple[str, str], list[str]] = {}
    with tarfile.open(directory / "html.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            speaker = ""
            for who, line in SPEAKER_OR_LINE.findall(file.read().decode("latin-1") if file else ""):
                speaker = who or speaker
                if line:
                    said.setdefault((member.name, speaker), []).append(html.unescape(line).strip())
    texts = ["\n".join(lines) + "\n" for lines in said.values()]
    return [text for text in texts if len(text) >= LEAST_CHARACTERS]


def deal(
    texts: list[str], parties: int, characters: int, test: int, length: int, seed: int
) -> tuple[list[Examples], Examples, int]:
    """Whole roles for every party, the last fifth of each kept for the test.

    Args:
        texts: of the roles.
        parties: number of parties.
        characters: of training text per party.
        test: characters of the test text, taken from all parties alike.
        length: of a sequence.
        seed: of the order in which roles are dealt out.

    Returns: training sequences of every party, test sequences, and the number of different characters.
    """
    alphabet = {character: i for i, character in enumerate(sorted(set("".join(texts))))}
    order = random.Random(seed).sample(texts, len(texts))
    hands = [order[party::parties] for party in range(parties)]
    train = ["".join(text[: len(text) * 4 // 5] for text in hand)[:characters] for hand in hands]
    held_out = ["".join(text[len(text) * 4 // 5 :] for text in hand)[: test // parties] for hand in hands]
    encoded = [sequences(text, alphabet, length) for text in train]
    return encoded, sequences("".join(held_out), alphabet, length), len(alphabet)


def sequences(text: str, alphabet: dict[str, int], length: int) -> Examples:
    """Sequences of ``length`` characters and, for each character, the one that follows; shape (count, length)."""
    codes: Tensor = torch.tensor([alphabet[character] for character in text])
    count = (len(codes) - 1) // length
    return codes[: count * length].view(count, length), codes[1 : count * length + 1].view(count, length)
