"""A client of flower.py. A module of its own, so that Ray's actors import it once and keep what it has read."""

import argparse
import os
from functools import cache
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def kept() -> tuple[np.ndarray, np.ndarray, Any]:
    """All clients' images, which the actors share, and a model to train."""
    if threads := int(os.environ["PEERS_THREADS"]):
        torch.set_num_threads(threads)
    folder = Path(os.environ["PEERS_FOLDER"])
    return np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy"), common.cnn()


@app.train()
def train(message: Message, context: Context) -> Message:
    x, y, network = kept()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    first = int(context.node_config["partition-id"]) * common.IMAGES_OF_CLIENT
    rows = slice(first, first + common.IMAGES_OF_CLIENT)
    own = torch.from_numpy(np.array(x[rows])), torch.from_numpy(y[rows])
    common.train_one(network, *own, argparse.Namespace(precision="ieee"))
    metrics = MetricRecord({"num-examples": common.IMAGES_OF_CLIENT})
    answer = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(answer, reply_to=message)
