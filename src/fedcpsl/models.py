"""The paper's network for MNIST, and your own."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from math import prod

from torch import nn

from fedcpsl.errors import InputError


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Sequential:
    """The paper's MLP: ReLU after every layer but the last. 784 inputs and 10 classes make 199,210 parameters."""
    sizes = [inputs, *hidden, classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_model(name: str, hidden: Sequence[int], shape: Sequence[int], classes: int) -> nn.Module:
    """A model by name, or from `package.module:function` called with (input shape, classes)."""
    if name == "mlp":
        return mlp(prod(shape), classes, hidden)
    if ":" not in name:
        raise InputError(f"model.name = {name!r}: give mlp, or your own model as package.module:function")
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a model beside the user is found, as `python -m` would find it
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"model.name = {name!r}: cannot be imported: {error}") from error
    model = make(tuple(shape), classes)
    if not isinstance(model, nn.Module):
        raise InputError(f"model.name = {name!r}: gave a {type(model).__name__} where an nn.Module is needed")
    return model
