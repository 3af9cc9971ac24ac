"""The paper's two networks, a few small others, and your own.

An input shape is that of one sample: channels first, without the batch. No model has BatchNorm, whose statistics have
no meaning over devices.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.settings import AUTO, toml_value

NAMES = ("mlp", "cnn", "resnet8", "cnn1d", "logistic")
_OF_THE_PAPER = {"mnist": "mlp", "fashion-mnist": "mlp", "cifar10": "cnn"}
_CNN_LEAST = 16  # pixels a side: two 5 x 5 convolutions and two halvings leave one
_CNN_MOST = 64 * 64  # pixels: its hidden layer grows with them, to 5 million parameters here
_RESNET_LEAST = 8


def choose_model(name: str, shape: Sequence[int], dataset: str) -> str:
    """The name itself; for `auto`, the paper's model for its own data sets, else one that suits the input shape."""
    if name != AUTO:
        return name
    if dataset in _OF_THE_PAPER:
        return _OF_THE_PAPER[dataset]
    if len(shape) == 2:
        return "cnn1d"
    if len(shape) != 3 or min(shape[1:]) < _CNN_LEAST:
        return "mlp"
    return "cnn" if prod(shape[1:]) <= _CNN_MOST else "resnet8"


def make_model(name: str, hidden: Sequence[int], shape: Sequence[int], classes: int) -> nn.Module:
    """A model by name, or from `package.module:function` called with (input shape, classes)."""
    assert name != AUTO, "choose_model decides first"
    if ":" in name:
        return _own_model(name, shape, classes)
    if name == "mlp":
        return mlp(prod(shape), classes, hidden)
    if name == "cnn":
        return cnn(shape, classes)
    if name == "resnet8":
        return resnet8(shape, classes)
    if name == "cnn1d":
        return cnn1d(shape, classes)
    if name == "logistic":
        return logistic(prod(shape), classes)
    raise InputError(
        f"model.name = {toml_value(name)}: no such model; give mlp or another by name, or your own as "
        f"package.module:function; {did_you_mean(name, (AUTO, *NAMES))}"
    )


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Sequential:
    """The paper's MLP: ReLU after every layer but the last. 784 inputs and 10 classes make 199,210 parameters."""
    sizes = [inputs, *hidden, classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic(inputs: int, classes: int) -> nn.Sequential:
    """Multinomial logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def cnn(shape: Sequence[int], classes: int) -> nn.Sequential:
    """The paper's CNN for images. 3 x 32 x 32 and 10 classes make 878,538 parameters."""
    _check_images("cnn", shape, _CNN_LEAST)
    channels, *sides = shape
    height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * height * width, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def resnet8(shape: Sequence[int], classes: int) -> nn.Sequential:
    """A ResNet of 8 layers for images, with GroupNorm. 3 x 32 x 32 and 10 classes make 78,042 parameters."""
    _check_images("resnet8", shape, _RESNET_LEAST)
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        _norm(16),
        nn.ReLU(),
        _residual_block(16, 16, 1),
        _residual_block(16, 32, 2),
        _residual_block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class ResidualBlock(nn.Module):
    """relu(main(x) + shortcut(x)), computed and differentiated by hand where all layers of both branches are."""

    def __init__(self, main: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.main, self.shortcut = main, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


def _residual_block(inputs: int, outputs: int, stride: int) -> ResidualBlock:
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""
    main = nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        _norm(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        _norm(outputs),
    )
    if stride == 1 and inputs == outputs:
        return ResidualBlock(main, nn.Sequential())
    return ResidualBlock(main, nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs)))


def cnn1d(shape: Sequence[int], classes: int) -> nn.Sequential:
    """A small CNN for windows of sensor signals of any length. 6 x 128 and 6 classes make 12,262 parameters.

    Chosen on smartphone activity recognition with few labels, where more layers, wider kernels and dropout gained
    nothing. Each norm is over all channels, so that how they compare (which way is down) is not normalised away; the
    mean and the peak over time did better than the mean alone.
    """
    if len(shape) != 2:
        raise InputError(_misfit("cnn1d", "signals [channels, time]", shape))
    return nn.Sequential(
        nn.Conv1d(shape[0], 32, 5, padding=2),
        nn.GroupNorm(1, 32),
        nn.ReLU(),
        nn.MaxPool1d(4, ceil_mode=True),  # so that a window shorter than 4 is left with something
        nn.Conv1d(32, 64, 5, padding=2),
        nn.GroupNorm(1, 64),
        nn.ReLU(),
        MeanAndPeak(),
        nn.Linear(128, classes),
    )


class MeanAndPeak(nn.Module):
    """[samples, channels, time] to the mean and the largest value of each channel, [samples, 2 channels]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean(-1), x.amax(-1)], -1)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 8, channels)


def _check_images(name: str, shape: Sequence[int], least: int) -> None:
    if len(shape) != 3:
        raise InputError(_misfit(name, "images [channels, height, width]", shape))
    if min(shape[1:]) < least:
        raise InputError(_misfit(name, f"images of at least {least} x {least} pixels", shape))


def _misfit(name: str, needs: str, shape: Sequence[int]) -> str:
    others = choose_model(AUTO, shape, "")
    if len(shape) == 3 and min(shape[1:]) >= _RESNET_LEAST:
        others += " or resnet8"
    given = f"the data has inputs of shape {list(shape)}"
    return f"model.name = {toml_value(name)}: needs {needs}, and {given}; give {others}"


def _own_model(name: str, shape: Sequence[int], classes: int) -> nn.Module:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a model beside the user is found, as `python -m` would find it
    doing = "cannot be imported"
    try:
        make = getattr(import_module(module), function)
        doing = f"failed when called with {(tuple(shape), classes)}"
        model = make(tuple(shape), classes)
    except Exception as error:  # whatever another's code may raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if doing == "cannot be imported" and (module.endswith(".py") or "/" in module):
            dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
            why = f"give a module, not a file: {dotted}:{function}"
        raise InputError(f"model.name = {toml_value(name)}: {doing}: {why}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model.name = {toml_value(name)}: gave a {type(model).__name__} where an nn.Module is needed")
    return model
