"""Which inputs a convolution's outputs look at, and the copies that make a matmul of it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """A convolution on a grid, [rows, columns] each; a signal in time is a grid of one row."""

    channels: int
    size: Pair  # of the input
    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: tuple[Pair, Pair]  # before and after

    @property
    def out_size(self) -> Pair:
        rows, columns = (
            (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, dilation, padding in zip(
                self.size, self.kernel, self.stride, self.dilation, self.padding, strict=True
            )
        )
        return rows, columns

    @property
    def patch(self) -> int:
        """How many numbers one output is made from."""
        return self.kernel[0] * self.kernel[1] * self.channels


def geometry_of(module: nn.Module, size: Pair) -> Geometry:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    ends = list(zip(module.kernel_size, module.dilation, strict=True))
    if module.padding == "same":
        padding = [((d * (k - 1)) // 2, d * (k - 1) - (d * (k - 1)) // 2) for k, d in ends]
    elif module.padding == "valid":
        padding = [(0, 0) for _ in ends]
    else:
        padding = [(int(p), int(p)) for p in module.padding]
    return Geometry(
        channels=module.in_channels,
        size=size,
        kernel=_pair(module.kernel_size),
        stride=_pair(module.stride),
        dilation=_pair(module.dilation),
        padding=((0, 0), padding[0]) if len(ends) == 1 else (padding[0], padding[1]),
    )


def _pair(numbers: tuple[int, ...]) -> Pair:
    return (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def as_grid(x: Tensor, trailing: int) -> Tensor:
    """[..., channels, time] or [..., channels, rows, columns] as the latter."""
    return x.unsqueeze(-2) if trailing == 1 else x


def channels_last(x: Tensor) -> Tensor:
    """[..., channels, rows, columns] as [..., rows, columns, channels], contiguous: copied only if it was not so."""
    return x.movedim(-3, -1).contiguous()


def channels_first(grid: Tensor) -> Tensor:
    """The same numbers in memory as PyTorch's order of dimensions."""
    return grid.movedim(-1, -3)


def patches(grid: Tensor, geometry: Geometry) -> Tensor:
    """[images, rows, columns, channels] as [images * out rows * out columns, kernel * channels], a copy."""
    (above, below), (left, right) = geometry.padding
    if above or below or left or right:
        grid = nn.functional.pad(grid, (0, 0, left, right, above, below))
    images, row, column, channel = grid.stride()
    view = grid.as_strided(
        (len(grid), *geometry.out_size, *geometry.kernel, geometry.channels),
        (
            images,
            row * geometry.stride[0],
            column * geometry.stride[1],
            row * geometry.dilation[0],
            column * geometry.dilation[1],
            channel,
        ),
    )
    return view.reshape(-1, geometry.patch)


def add_up_patches(columns: Tensor, geometry: Geometry, images: int) -> Tensor:
    """The transpose of `patches`: every place of the grid gets the sum of its copies."""
    (above, below), (left, right) = geometry.padding
    (rows, cols), (out_rows, out_cols) = geometry.size, geometry.out_size
    view = columns.view(images, out_rows, out_cols, *geometry.kernel, geometry.channels)
    if geometry.kernel == geometry.stride == (1, 1) and geometry.padding == ((0, 0), (0, 0)):
        return view.view(images, rows, cols, geometry.channels)
    total = columns.new_zeros(images, rows + above + below, cols + left + right, geometry.channels)
    for i in range(geometry.kernel[0]):
        for j in range(geometry.kernel[1]):
            top, side = i * geometry.dilation[0], j * geometry.dilation[1]
            bottom, end = top + geometry.stride[0] * out_rows, side + geometry.stride[1] * out_cols
            total[:, top : bottom : geometry.stride[0], side : end : geometry.stride[1]] += view[:, :, :, i, j]
    return total[:, above : above + rows, left : left + cols]


def rectify_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    """A gradient taken back through the ReLU that gave y."""
    return torch.ops.aten.threshold_backward(gradient.to(y.dtype), y, 0)
