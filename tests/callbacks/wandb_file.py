"""Reads the file of an offline W&B run: blocks of 32 KiB of (checksum u32, length u16, type u8, payload)."""

import json
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
HEADER = 7
CHUNK = struct.Struct("<IHB")
FULL, LAST = 1, 4


@dataclass
class Run:
    """Record of an offline run; ``history`` has one dict per call of ``log``, whose nested keys are joined by "/".

    ``defined`` is name → values that the summary keeps, ``artifacts`` are name → file → its place on the disk.
    """

    project: str = ""
    group: str = ""
    job_type: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    defined: dict[str, set[str]] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    artifacts: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """Keys of figures, pictures, tables and histograms, without those of W&B and Lightning."""
        found = set()
        for row in self.history:
            media = tuple(f"{key.removesuffix('_type')}" for key in row if key.endswith("/_type"))
            found |= {each[:-1] for each in media} | {key for key in row if not key.startswith(media)}
        return {key for key in found if key[0] != "_"} - {"round", "epoch", "trainer/global_step"}


def go_offline(patch: Any, folder: Path) -> None:
    """Let W&B have no account, and none of its folders but those in ``folder``."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        patch.delenv(name)
    for name, value in {"SILENT": "true", "MODE": "offline"}.items():
        patch.setenv(f"WANDB_{name}", value)
    for name in ("CACHE", "DATA", "CONFIG"):
        patch.setenv(f"WANDB_{name}_DIR", str(folder / name.lower()))


def read_run(path: Path, patience: float = 60.0) -> Run:
    """The finished run in the file ``path``; W&B's own process may write it a little after ``wandb.finish()``."""
    deadline = time.monotonic() + patience
    while True:
        found = [Record.FromString(payload) for payload in records(path.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return run_of(found)
        assert time.monotonic() < deadline, f"{path} has no end after {patience} s"
        time.sleep(0.1)


def run_of(found: list[Any]) -> Run:
    run = Run()
    for record in found:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.project, run.group = record.run.project, record.run.run_group
            run.job_type, run.name = record.run.job_type, record.run.display_name
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "history":
            run.history.append({_key(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "metric" and record.metric.name:  # others are patterns
            run.defined[record.metric.name] = {
                each.name for each, is_kept in record.metric.summary.ListFields() if is_kept
            }
        elif kind == "alert":
            run.alerts.append((record.alert.title, record.alert.text))
        elif kind == "artifact":
            entries = record.artifact.manifest.contents
            run.artifacts[record.artifact.name] = {each.path: each.local_path for each in entries}
    return run


def records(data: bytes) -> Iterator[bytes]:
    position, parts = HEADER, []
    while position + CHUNK.size <= len(data):
        room = BLOCK - position % BLOCK
        if room < CHUNK.size:  # too little for a chunk: zeros
            position += room
            continue
        _, length, kind = CHUNK.unpack_from(data, position)
        position += CHUNK.size
        payload = data[position : position + length]
        position += length
        if position > len(data):
            return  # still being written
        parts.append(payload)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def _update(config: dict[str, Any], items: Any) -> None:
    config.update({_key(item): json.loads(item.value_json) for item in items})


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)
