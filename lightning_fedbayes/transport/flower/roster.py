"""Roster of the connected clients: the node of each client's number."""

import time

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from lightning.pytorch.utilities import rank_zero_info

from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.transport.flower.wire import message_in

POLL_SECONDS = 0.5
"""Interval at which a server that waits for clients looks again."""


class Roster:
    """The connected clients, by number. ``nodes`` maps client → node, ascending.

    Random draws and a rule's state go by the client's number, which outlives a node's connection. A node says once in
    a run which client it is. A number belongs to the first node that claims it, while that node is connected.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, int] = {}
        self._claims: dict[int, int] = {}
        self._silent: set[int] = set()
        self._greeted: dict[int, tuple[str | None, float]] = {}

    def wait(self, grid: Grid, clients: int, timeout: float, at_once: bool = False) -> dict[int, int]:
        """Wait for ``clients`` clients, without ``at_once`` for all nodes. Raise FederationError at the timeout."""
        start = time.monotonic()
        while len(self.look(grid, timeout) if at_once else self.update(grid, timeout)) < clients:
            if time.monotonic() - start > timeout:
                remedy = "raise timeout= while processes start, start the other SuperNodes, or lower wait_for="
                have = f"{len(self.nodes)} of {clients} clients have answered after {timeout:g} s"
                raise FederationError(f"{have}; {remedy}, or Safeguards(min_clients=)")
            time.sleep(POLL_SECONDS)
        return self.nodes

    def update(self, grid: Grid, timeout: float) -> dict[int, int]:
        """Ask new nodes who they are, and forget nodes that have gone. Return client → node."""
        strangers = self._strangers(grid)
        if strangers:
            questions = [Message(RecordDict(), node, MessageType.QUERY) for node in strangers]
            replies = grid.send_and_receive(questions, timeout=timeout)
            for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
                self._enter(reply)
        return self._settle()

    def look(self, grid: Grid, timeout: float) -> dict[int, int]:
        """Do as :meth:`update` does without waiting: a new node's answer counts in a later call."""
        now, strangers = time.monotonic(), self._strangers(grid)
        self._greeted = {
            node: (identity, since)
            for node, (identity, since) in self._greeted.items()
            if node in strangers and now - since <= timeout
        }
        for node in strangers:
            if node not in self._greeted:
                sent = list(grid.push_messages([Message(RecordDict(), node, MessageType.QUERY)]))
                self._greeted[node] = (sent[0] if sent else None, now)
        asked = {identity: node for node, (identity, _) in self._greeted.items() if identity}
        for reply in grid.pull_messages(list(asked)) if asked else ():
            node = asked.get(reply.metadata.reply_to_message_id)
            if node is not None:
                self._greeted[node] = (None, now)
                self._enter(reply)
        return self._settle()

    def _strangers(self, grid: Grid) -> list[int]:
        """Forget nodes that have gone, and return nodes that have not said who they are."""
        connected = set(grid.get_node_ids())
        self._claims = {node: number for node, number in self._claims.items() if node in connected}
        return sorted(connected - self._claims.keys())

    def _settle(self) -> dict[int, int]:
        """Give each number to the first node that has claimed it. Return client → node."""
        holders: dict[int, int] = {}
        for node, number in self._claims.items():  # the first that has claimed a number comes first
            holders.setdefault(number, node)
        self.nodes = dict(sorted(holders.items()))
        return self.nodes

    def _enter(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        try:
            number = message_in(reply, None, "introduction", 0).client
        except FusionError as refusal:  # it will be asked again
            if node not in self._silent:
                rank_zero_info(f"Node {node} does not say which client it is: {refusal}")
            self._silent.add(node)
            return
        if number in self._claims.values():
            remedy = "give every SuperNode a partition-id of its own"
            rank_zero_info(f"Node {node} is left out: another node is client {number}, too; {remedy}")
        self._claims[node] = number
