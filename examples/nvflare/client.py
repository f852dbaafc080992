"""A client: FLARE's usual loop."""

import nvflare.client as flare
from digits import network

import lightning_fedbayes as fb
from lightning_fedbayes.nvflare import FusionClient

flare.init()
# the partition only divides the digits among the clients; data of their own need none
partition = fb.DirichletPartition(clients=2, alpha=0.5)
client = FusionClient(network(), fb.DigitsDataModule(), partition=partition, local_epochs=2)
while flare.is_running():
    flare.send(client.answer(flare.receive()))
