"""A Flower grid in one process: messages are put through ClientApps, as they would arrive over a network."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

NODE = 1000
"""The node of client 0; that of client k is ``NODE - k``, so that nodes are in another order than clients."""

App = Callable[[Message, Context], Message]
Change = Callable[[Message], "Message | None"]


class LocalGrid:
    """Every client has its ClientApp; ``change`` alters the replies of ``kinds`` (None: of all), or loses them."""

    def __init__(
        self,
        apps: Iterable[App],
        change: dict[int, Change] | None = None,
        numbers: list[Any] | None = None,
        kinds: tuple[str, ...] | None = ("train",),
    ) -> None:
        self.kinds = kinds
        self.seen: list[tuple[int, Message, Message | None]] = []
        self.apps = dict(enumerate(apps))
        self.change = change or {}
        self.numbers = list(self.apps) if numbers is None else numbers
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def get_node_ids(self) -> list[int]:
        return [NODE - client for client in self.apps]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        kind = messages[0].metadata.message_type if messages else "nothing"
        self.asked.append((kind, tuple(NODE - message.metadata.dst_node_id for message in messages)))
        replies = [self._answer(message) for message in messages]
        return [reply for reply in reversed(replies) if reply is not None]  # the last asked is the first to answer

    def _answer(self, message: Message) -> Message | None:
        client = NODE - message.metadata.dst_node_id
        message.metadata.__dict__.update(_message_id=message.object_id)
        assert get_all_nested_objects(message)  # it can be sent
        number = self.numbers[client]
        context = Context(0, NODE - client, {} if number is None else {"partition-id": number}, RecordDict(), {})
        try:
            reply = self.apps[client](message, context)
        except Exception as error:
            reply = Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
        if client in self.change and (self.kinds is None or message.metadata.message_type in self.kinds):
            reply = self.change[client](reply)
        self.seen.append((client, message, reply))
        return reply

    def of(self, kind: str) -> list[tuple[int, Message, Any]]:
        """What was seen of messages of a type."""
        return [each for each in self.seen if each[1].metadata.message_type == kind]


class SlowGrid(LocalGrid):
    """Replies arrive one by one in an order drawn from ``seed``; ``slow``: client → how many of others come before."""

    def __init__(self, apps: Iterable[App], change: Any = None, seed: int = 0, slow: Any = None) -> None:
        super().__init__(apps, change)
        self.chance, self.slow = random.Random(seed), slow or {}
        self.waiting: dict[str, tuple[int, int, Message]] = {}
        self.released = 0
        self.away: set[int] = set()
        self.delivered: list[int] = []

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if NODE - node not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        identities = []
        for message in messages:
            client = NODE - message.metadata.dst_node_id
            self.asked.append((message.metadata.message_type, (client,)))
            wait = self.slow.get(client, 0) if message.metadata.message_type == "train" else 0
            reply = self._answer(message)
            identities.append(message.metadata.message_id)
            if reply is not None:
                self.waiting[identities[-1]] = (self.released + wait, client, reply)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        here = [each for each in message_ids if each in self.waiting]
        ready = [each for each in here if self.waiting[each][0] <= self.released] or here
        if not ready:
            return []
        self.released += 1
        ready.sort(key=lambda each: self.waiting[each][1])  # not by names, which are other ones in every run
        _, client, reply = self.waiting.pop(self.chance.choice(ready))
        if reply.metadata.message_type == "train":
            self.delivered.append(client)
        return [reply]
