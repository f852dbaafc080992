"""States of clients on disk, in a file of SQLite in which a round is one transaction."""

import io
import pickle
import sqlite3
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError

FILE, LOCK = "clients.sqlite", "lock.sqlite"
TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (
    client INTEGER, rounds INTEGER, checksum INTEGER, state BLOB, PRIMARY KEY (client, rounds)
) WITHOUT ROWID;
INSERT OR IGNORE INTO facts VALUES ('sum', 0);
CREATE TRIGGER IF NOT EXISTS written AFTER INSERT ON states BEGIN
    UPDATE facts SET value = value + new.client + new.rounds + new.checksum WHERE name = 'sum';
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON states BEGIN
    UPDATE facts SET value = value - old.client - old.rounds - old.checksum WHERE name = 'sum';
END;
"""
SUM = "SELECT name, value, (SELECT ifnull(sum(client + rounds + checksum), 0) FROM states) FROM facts ORDER BY name"
MOST_WAITING = 2**20
"""Bytes of states that are written together, in half the time if they are small."""
DAMAGED = "its bytes are not those that were written"
OLDEST = "AND rounds < (SELECT max(rounds) FROM states WHERE client = :client AND rounds <= :needed)"


class Store:
    """The states of a run's clients in a folder. Memory holds none of them.

    The states of a round become the run's in one transaction, when the round ends: whenever a process is killed, the
    folder holds whole rounds. It keeps the last state of a client and the states of the last two checkpoints, so that a
    run goes on from either, even if the last one was not written to its end. Every state has a checksum, and there is
    one of all others: bytes that have changed are noticed. Raises FederationError if the folder cannot be used or is
    damaged, or another process writes into it.

    Args:
        folder: of this run only. Made if it is missing. Several processes share it.
        writes: this process writes what all have trained.
    """

    def __init__(self, folder: str | Path, *, writes: bool = True) -> None:
        self.folder, self.writes = Path(folder), writes
        self.run = ""
        self.rounds = 0
        self._marks: list[int] = []
        self._waiting: dict[int, bytes] = {}
        self._size = 0
        self._file: sqlite3.Connection | None = None
        self._lock: sqlite3.Connection | None = None
        if writes:
            try:
                with self._told():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._hold()
                    self._open.executescript(TABLES)
                    self._check()
                    self.run = self._fact("run", "")
                    self.rounds = self._fact("rounds", 0)
            except BaseException:  # its traceback may hold this object
                self.close()
                raise

    def begin(self) -> None:
        """Begin a new run. Raise FederationError if the folder holds another one."""
        if not self.writes:
            return
        if self._fact("marks", ""):  # otherwise no checkpoint can go on with them
            raise FederationError(
                f"{self.folder} holds the clients of another run, of {self.rounds} rounds: go on with it, as by "
                'fit(ckpt_path="last"), give a folder of its own, or delete it'
            )
        self.run, self.rounds, self._marks = uuid.uuid4().hex, 0, []
        with self._written():
            self._open.execute("DELETE FROM states")
            self._note(run=self.run, rounds=0, marks="")

    def resume(self, run: str, rounds: int) -> None:
        """Go back to a checkpoint of a ``run`` after ``rounds``. Raise FederationError if its states are not there."""
        with self._told():
            self._check()
            if self._fact("run", "") != run:
                why = "bring back the folder that the run has written, or start a new run"
                raise FederationError(f"{self.folder} does not hold the clients of the checkpoint: {why}")
            known = [int(each) for each in self._fact("marks", "").split()]
        if self.writes:
            oldest = known[0] if known else self.rounds
            if not oldest <= rounds <= self.rounds:
                raise FederationError(
                    f"{self.folder} holds the clients after rounds {oldest} to {self.rounds}, and the checkpoint was "
                    f"written after round {rounds}: resume from one of the last two checkpoints"
                )
            self._marks = [each for each in known if each <= rounds]
            with self._written():
                self._open.execute("DELETE FROM states WHERE rounds > ?", (rounds,))
                self._note(rounds=rounds, marks=self._marked)
        self.run, self.rounds = run, rounds

    def mark(self) -> None:
        """Keep the states after the last finished round for the checkpoint that is being written."""
        if self.writes and self.rounds not in self._marks:
            self._marks = [*self._marks[-1:], self.rounds]
            if not self._open.in_transaction:  # otherwise the round that is under way writes it, in time
                with self._written():
                    self._note(marks=self._marked)

    @property
    def reference(self) -> dict[str, Any]:
        """Reference that a checkpoint holds in place of the states."""
        return {"folder": str(self.folder), "run": self.run, "rounds": self.rounds}

    @property
    def _marked(self) -> str:
        return " ".join(map(str, self._marks))

    def get(self, client: int) -> dict[str, Any] | None:
        """Return the state of a client after the last finished round, or None if it has none."""
        return self._read("rounds <= ? ORDER BY rounds DESC LIMIT 1", client, self.rounds) if self.rounds else None

    def _read(self, when: str, client: int, rounds: int) -> dict[str, Any] | None:
        with self._told():
            query = f"SELECT rounds, checksum, state FROM states WHERE client = ? AND {when}"
            found = self._open.execute(query, (client, rounds)).fetchone()
            if found is not None and found[1] != _checksum(client, found[0], found[2]):
                raise sqlite3.DatabaseError(DAMAGED)
        return None if found is None else pickle.loads(found[2])

    def put(self, client: int, state: Mapping[str, Any]) -> None:
        """Write the state of a client after the present round. It counts when :meth:`finish` is called."""
        file = io.BytesIO()
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(dict(state))
        self._waiting[client] = file.getvalue()
        self._size += file.tell()
        if self._size >= MOST_WAITING:
            self._flush()

    def pending(self, client: int) -> dict[str, Any] | None:
        """Return what :meth:`put` was given of a client in the present round, or None if it was not called."""
        if client in self._waiting:
            return pickle.loads(self._waiting[client])
        return self._read("rounds = ?", client, self.rounds + 1)

    def _flush(self) -> None:
        if not self._waiting:
            return
        needed = self._marks[0] if self._marks else self.rounds
        waiting, self._waiting, self._size = self._waiting, {}, 0
        with self._told():
            if not self._open.in_transaction:
                self._open.execute("BEGIN IMMEDIATE")
            new = self.rounds + 1
            rows = ((client, new, _checksum(client, new, state), state) for client, state in waiting.items())
            self._open.executemany("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)", rows)
            if self.rounds:
                old = ({"client": client, "needed": needed} for client in waiting)
                self._open.executemany(f"DELETE FROM states WHERE client = :client {OLDEST}", old)

    def forget(self, client: int) -> None:
        """Drop what the present round has written of a client."""
        if self._waiting.pop(client, None) is None:  # its bytes count until the next writing: no matter
            with self._told():
                self._open.execute("DELETE FROM states WHERE client = ? AND rounds > ?", (client, self.rounds))

    def finish(self, *, success: bool) -> None:
        """End the round: every client keeps its new state, or none does."""
        if self.writes:
            if success:
                self._flush()
            self._waiting, self._size = {}, 0
            with self._told():
                if success:
                    self._note(rounds=self.rounds + 1, marks=self._marked)
                    self._open.commit()
                else:
                    self._open.rollback()
        self.rounds += success

    def clients(self) -> Iterator[int]:
        """Yield the numbers of the clients that have a state, ascending."""
        with self._told():
            query = "SELECT DISTINCT client FROM states WHERE rounds <= ? ORDER BY client"
            yield from [number for (number,) in self._open.execute(query, (self.rounds,))]

    @staticmethod
    def state_in(clients: Mapping[Any, Any], client: int) -> Mapping[str, Any]:
        """Return the state of a client in a checkpoint's ``clients``: states by number, or a :attr:`reference`."""
        if "folder" not in clients:
            return clients.get(client, {})
        store = Store(clients["folder"], writes=False)
        store.resume(clients["run"], clients["rounds"])
        found = store.get(client)
        store.close()
        return found or {}

    def close(self) -> None:
        """Release the folder's lock. States can still be read."""
        for each in (self._file, self._lock):
            if each is not None:
                each.close()
        self._file = self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None, "_lock": None}

    def __del__(self) -> None:
        if "_lock" in vars(self):  # a run that has ended early closes nothing, of which Python 3.13 warns
            self.close()

    @property
    def _open(self) -> sqlite3.Connection:
        if self._file is None:
            self._file = sqlite3.connect(self.folder / FILE, timeout=60, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.execute("PRAGMA recursive_triggers = ON")  # so that a state that is replaced counts as deleted
        return self._file

    def _hold(self) -> None:
        """Lock the folder against other writers until this process ends, however it ends."""
        self._lock = sqlite3.connect(self.folder / LOCK, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            why = "give each run a folder of its own"
            raise FederationError(f"{self.folder} is in use by another run: {why}") from error

    def _fact(self, name: str, default: Any) -> Any:
        found = self._open.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if found is None else found[0]

    def _note(self, **facts: Any) -> None:
        if not self._open.in_transaction:
            self._open.execute("BEGIN IMMEDIATE")
        write = "INSERT OR REPLACE INTO facts VALUES (?, ?)"
        self._open.executemany(write, facts.items())
        known = self._open.execute("SELECT name, value FROM facts WHERE name != 'checksum' ORDER BY name").fetchall()
        self._open.execute(write, ("checksum", _checksum(*known)))

    def _check(self) -> None:
        """Raise sqlite3.DatabaseError if the facts, or the states as a whole, are not those that were written."""
        found = self._open.execute(SUM).fetchall()
        known = [(name, value) for name, value, _ in found if name != "checksum"]
        whole = known == [("sum", 0)] or ("checksum", _checksum(*known)) in [row[:2] for row in found]
        if not whole or any(total != dict(known)["sum"] for *_, total in found):
            raise sqlite3.DatabaseError(DAMAGED)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Inside, changes are one transaction."""
        with self._told():
            try:
                yield
                if self._open.in_transaction:
                    self._open.commit()
            except BaseException:
                self._open.rollback()
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Inside, an error of the disk, or a damaged file, names the folder and the remedy."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if not isinstance(error, sqlite3.OperationalError | OSError):
                why = f"{error}: bring back a copy of the folder, or delete it and start again"
                raise FederationError(f"{self.folder / FILE} is damaged: {why}") from error
            why = f"{error}. The last finished round is whole; make room there or give another folder, and resume"
            raise FederationError(f"clients cannot keep their states in {self.folder}: {why}") from error


def _checksum(*values: Any) -> int:
    """Return a checksum of bytes, numbers and texts."""
    found = 0
    for value in values:
        found = zlib.crc32(value if isinstance(value, bytes) else f"{value!r};".encode(), found)
    return found


class _Pickler(pickle.Pickler):
    """Writes tensors as they lie in memory, ten times as fast as torch.save for small ones."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return NotImplemented
        if value.requires_grad or value.device.type != "cpu":
            value = value.detach().cpu()
        try:
            content = value.numpy().tobytes()
        except (TypeError, RuntimeError):  # bfloat16 and others that NumPy lacks
            content = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (bytearray(content), value.dtype, tuple(value.shape))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that has its memory to itself."""
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
