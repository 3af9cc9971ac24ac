"""Weak and strong views of a sample: what semi-supervised algorithms learn from beside the sample itself.

A view is a function of inputs [..., rows, *shape of one input] and of one key per row, [..., rows], from which its
random numbers are computed where the inputs lie; the schedule draws the keys. So all executors make the same views.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.engine.dropout import keyed_uniform
from fedcpsl.errors import InputError

View = Callable[[Tensor, Tensor], Tensor]
DIMENSIONS = {"image": 3, "photograph": 3, "drawing": 3, "window": 2, "table": 1}  # of an input, by its kind
CHOICES = ("auto", *DIMENSIONS)
STRONG = "strong "  # before a kind: no weak views
WEAK_WARP, STRONG_WARP = 0.17, 0.35  # of drawings, in radians: ten and twenty degrees
MOST_MAPS, FEWEST_MAPS, MAP_PIXELS = 256, 64, 1 << 20  # of drawings: fewer for large images
MOST_PIXEL_SOURCES = 1 << 18  # that are kept for all moves of an image; with more, those of each view are computed
PLACE, SHADE, NOISE, TURN = range(4)  # streams of random numbers of one key
COLOUR = TURN  # which images do not use


class Views(NamedTuple):
    """A weak and a strong view; each takes normalised inputs and keys, and returns inputs of the same shape."""

    weak: View
    strong: View


class Axes(NamedTuple):
    """Three channels of a window that are the x, y and z axis of a sensor, and how each was normalised."""

    channels: tuple[int, int, int]
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)


@lru_cache(maxsize=32)
def views_for(kind: "str | Views", shape: tuple[int, ...], axes: tuple[Axes, ...] = ()) -> Views | None:
    """The views of inputs of a shape; `kind` is one of CHOICES, "auto" for what the shape suggests, or "" for none.

    Images of three channels are taken for photographs, others for drawings, unless `kind` says which they are.

    With "strong " before it the weak view is the input itself.
    """
    if not kind or isinstance(kind, Views):
        return kind or None
    if kind.startswith(STRONG):
        both = views_for(kind.removeprefix(STRONG), shape, axes)
        return both and both._replace(weak=as_it_is)
    if len(shape) not in DIMENSIONS.values():
        raise InputError(f"views: inputs of shape {list(shape)} have none of their own; give Views(weak, strong)")
    if kind != "auto" and DIMENSIONS.get(kind) != len(shape):
        raise InputError(f"views = {kind!r}: do not fit inputs of shape {list(shape)}; give auto")
    if len(shape) == 3:
        return photograph_views(shape) if mirrored(kind, shape) else drawing_views(shape)
    return window_views(shape, axes) if len(shape) == 2 else table_views(shape)


def as_it_is(x: Tensor, _keys: Tensor) -> Tensor:
    """x."""
    return x


def viewed(views: Views, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Weak views of all rows, and strong views of the last ones: as many as there are more keys than rows.

    x is [..., rows, *shape], keys [..., rows + strong rows].
    """
    lead = keys.dim() - 1
    rows = x.shape[lead]
    last = x.narrow(lead, 2 * rows - keys.shape[-1], keys.shape[-1] - rows)
    return views.weak(x, keys[..., :rows]), views.strong(last, keys[..., rows:])


def mirrored(kind: "str | Views", shape: tuple[int, ...]) -> bool:
    """Whether inputs mean the same in a mirror, as photographs do."""
    named = kind.removeprefix(STRONG) if isinstance(kind, str) else "auto"
    return len(shape) == 3 and (named == "photograph" or (named in ("auto", "image") and shape[0] == 3))


def photograph_views(shape: tuple[int, ...]) -> Views:
    """Shifts by up to an eighth, mirror images; strong: contrast, brightness, a colour cast and a blank square too."""
    moved = partial(shifted_images, most=min(shape[1:]) // 8)
    return Views(moved, _with_less_to_see(moved, shape, colour=0.3))


def drawing_views(shape: tuple[int, ...]) -> Views:
    """Warped images; strong: warped more, contrast, brightness and a blank square too.

    They shift by less than photographs, and small ones hardly: a pixel of eight is a stroke's width. A drawing has
    another meaning in a mirror, but not if it is a bit oblique.
    """
    most = max(0, (min(shape[1:]) - 8) // 8)
    moved, farther = (partial(warped_images, most=most, warp=warp) for warp in (WEAK_WARP, STRONG_WARP))
    return Views(moved, _with_less_to_see(farther, shape))


def _with_less_to_see(moved: View, shape: tuple[int, ...], colour: float = 0.0) -> View:
    """The view of moved images with other contrast, brightness and colours, and a square of 2/5 of the side blank."""
    blank = max(1, min(shape[1:]) * 2 // 5)

    def view(x: Tensor, keys: Tensor) -> Tensor:
        seen = shaded(moved(x, keys), keys, 0.6, 0.6)
        return without_square(coloured(seen, keys, colour) if colour else seen, keys, blank)

    return view


def window_views(shape: tuple[int, ...], axes: tuple[Axes, ...] = ()) -> Views:
    """Shifts in time by an eighth, a scale, noise; strong: three times as much, and a quarter of the readings blank.

    Sensors whose axes are known are rotated together by up to 15 degrees in both: nobody carries a phone the same way.
    """
    time = shape[1]

    def view(x: Tensor, keys: Tensor, strength: float) -> Tensor:
        x = rotated(x, keys, axes, 15.0) if axes else x
        moved = scaled(shifted_in_time(x, keys, max(1, time // 8)), keys, 0.1 * strength)
        return with_noise(moved, keys, 0.05 * strength)

    return Views(
        partial(view, strength=1.0),
        lambda x, keys: without_readings(view(x, keys, 3.0), keys, max(1, time // 4)),
    )


def table_views(_shape: tuple[int, ...]) -> Views:
    """The row itself; strong: with noise."""
    return Views(lambda x, _: x, partial(with_noise, deviation=0.3))


def _uniform(keys: Tensor, stream: int, count: int, like: Tensor) -> Tensor:
    """Random numbers in [0, 1), [..., rows, count]."""
    return keyed_uniform(keys, stream, count).to(like.dtype)


def _per_row(number: Tensor, x: Tensor) -> Tensor:
    """One number per row, [..., rows], shaped to go with x."""
    return number.reshape(number.shape + (1,) * (x.dim() - number.dim()))


def _whole(u: Tensor, count: int) -> Tensor:
    """Whole numbers from 0 to count - 1, all as likely."""
    return (u * count).to(torch.int64).clamp_max(count - 1)


def _looked_up(table: Tensor, at: Tensor) -> Tensor:
    """table[at]; faster on a CPU."""
    return table.index_select(0, at.flatten()).view(*at.shape, *table.shape[1:])


# Tables are kept for ever: captured steps read them where they lie.


@cache
def _sources(size: int, most: int, device: torch.device) -> Tensor:
    """Where each of `size` places is read from after a move by -most to most places, the edge repeated; then mirrored.

    [2 (2 most + 1), size]
    """
    moves, places = torch.arange(-most, most + 1, device=device), torch.arange(size, device=device)
    at = (places + moves[:, None]).clamp(0, size - 1)
    return torch.cat([at, size - 1 - at])


def shifted_images(x: Tensor, keys: Tensor, most: int) -> Tensor:
    """Images [..., rows, channels, height, width] shifted by up to `most` pixels; half of them mirrored."""
    u, (height, width), moves = _uniform(keys, PLACE, 3, x), x.shape[-2:], 2 * most + 1
    move = _whole(u[..., :2], moves)
    across = move[..., 1] + moves * (u[..., 2] < 0.5)
    if moves * 2 * moves * height * width <= MOST_PIXEL_SOURCES:
        at = _looked_up(_pixel_sources(height, width, most, x.device), move[..., 0] * 2 * moves + across)
    else:
        row, column = _sources(height, most, x.device)[move[..., 0]], _sources(width, most, x.device)[across]
        at = (row[..., :, None] * width + column[..., None, :]).flatten(-2)
    return x.flatten(-2).gather(-1, at[..., None, :].expand(*x.shape[:-2], height * width)).view(x.shape)


@cache
def _pixel_sources(height: int, width: int, most: int, device: torch.device) -> Tensor:
    """Where each pixel is read from after every move down and across, [moves down * moves across, height * width]."""
    down, across = _sources(height, most, device)[: 2 * most + 1], _sources(width, most, device)
    return (down[:, None, :, None] * width + across[:, None, :]).flatten(2).flatten(0, 1)


def warped_images(x: Tensor, keys: Tensor, most: int, warp: float) -> Tensor:
    """Images [..., rows, channels, height, width], each moved by one of some affine maps, the edge repeated.

    A map rotates by up to `warp` radians, shears and scales by up to 0.6 `warp`, shifts by up to `most` + 1/2 pixels.
    """
    height, width = x.shape[-2:]
    maps = _affine_maps(height, width, most, warp, x.device)
    at = _looked_up(maps, _whole(_uniform(keys, PLACE, 1, x)[..., 0], len(maps)))
    return x.flatten(-2).gather(-1, at[..., None, :].expand(*x.shape[:-2], height * width)).view(x.shape)


@cache
def _affine_maps(height: int, width: int, most: int, warp: float, device: torch.device) -> Tensor:
    """Where each pixel is read from, the nearest one, by many random affine maps, [maps, height * width]."""
    count = min(MOST_MAPS, max(MAP_PIXELS // (height * width), FEWEST_MAPS))
    u = 2 * keyed_uniform(torch.arange(count), PLACE, 6).double() - 1
    angle, shear, taller, wider, down, across = u.T[..., None]
    cos, sin, oblique, shift = (warp * angle).cos(), (warp * angle).sin(), 0.6 * warp, most + 0.5
    middle = (height - 1) / 2, (width - 1) / 2
    pixel = torch.arange(height * width)
    row, column = pixel // width - middle[0], pixel % width - middle[1]
    from_row = (1 + oblique * taller) * (cos * row + sin * column) + shift * down
    from_column = (1 + oblique * wider) * (cos * column - sin * row + oblique * shear * row) + shift * across
    rows = (from_row + middle[0]).round().clamp(0, height - 1)
    columns = (from_column + middle[1]).round().clamp(0, width - 1)
    return (rows * width + columns).long().to(device)


def shaded(x: Tensor, keys: Tensor, contrast: float, brightness: float) -> Tensor:
    """s x + (1 - s) mean + b: contrast s = U(1 - contrast, 1 + contrast) about each image's mean, and brightness b."""
    u = 2 * _uniform(keys, SHADE, 2, x) - 1
    scale, more = 1 + contrast * u[..., 0], brightness * u[..., 1]
    return torch.addcmul(_per_row(torch.addcmul(more, 1 - scale, x.mean((-1, -2, -3))), x), x, _per_row(scale, x))


def coloured(x: Tensor, keys: Tensor, most: float) -> Tensor:
    """Images with a scale U(1 - most, 1 + most) and an offset U(-most, most) of each channel's own."""
    channels = x.shape[-3]
    u = 2 * _uniform(keys, COLOUR, 2 * channels, x) - 1
    return x * (1 + most * u[..., :channels])[..., None, None] + most * u[..., channels:, None, None]


def without_square(x: Tensor, keys: Tensor, side: int) -> Tensor:
    """Images with a square of pixels set to zero, its centre anywhere in the image, cut at the border."""
    u, (height, width) = _uniform(keys, NOISE, 2, x), x.shape[-2:]
    row, column = _near(u[..., 0], height, side, x), _near(u[..., 1], width, side, x)
    return x * (1 - row[..., :, None] * column[..., None, :])[..., None, :, :]


def _near(u: Tensor, size: int, count: int, x: Tensor) -> Tensor:
    """1 for the places of a dimension that are among `count` around a random one, else 0; [..., rows, size]."""
    return _looked_up(_neighbours(size, count, x.device, x.dtype), _whole(u, size))


@cache
def _neighbours(size: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """1 for the places that are among `count` in a row around each place, [size, size]."""
    along = torch.arange(size, device=device)
    first = along[:, None] - (count - 1) // 2
    return ((along >= first) & (along < first + count)).to(dtype)


def shifted_in_time(x: Tensor, keys: Tensor, most: int) -> Tensor:
    """Windows [..., rows, channels, time] shifted by up to `most` readings."""
    move = _whole(_uniform(keys, PLACE, 1, x)[..., 0], 2 * most + 1)
    at = _looked_up(_sources(x.shape[-1], most, x.device), move)
    return x.gather(-1, at[..., None, :].expand(x.shape))


def scaled(x: Tensor, keys: Tensor, most: float) -> Tensor:
    """U(1 - most, 1 + most) x."""
    u = 2 * _uniform(keys, SHADE, 1, x)[..., 0] - 1
    return x * _per_row(1 + most * u, x)


def with_noise(x: Tensor, keys: Tensor, deviation: float) -> Tensor:
    """x + uniform noise of a standard deviation, of each number on its own."""
    u = _uniform(keys, NOISE, x.shape[keys.dim() :].numel(), x).reshape(x.shape)
    return x + (2 * 3**0.5 * deviation) * (u - 0.5)


def without_readings(x: Tensor, keys: Tensor, count: int) -> Tensor:
    """Windows with `count` readings in a row set to zero, of all channels."""
    blank = _near(_uniform(keys, PLACE, 2, x)[..., 1], x.shape[-1], count, x)
    return x * (1 - blank)[..., None, :]


def rotated(x: Tensor, keys: Tensor, axes: tuple[Axes, ...], most: float) -> Tensor:
    """Windows with each sensor's x, y and z turned by U(-most, most) degrees about a random direction, all alike.

    Readings are rotated as they were before they were normalised.
    """
    channels, shift, scale = _axes_tensors(axes, x.device, x.dtype)
    turn = _rotation(_uniform(keys, TURN, 3, x), most * pi / 180).unsqueeze(-3)
    sensors = x.index_select(-2, channels).unflatten(-2, (-1, 3))  # [..., rows, sensors, 3, time]
    turned = (turn @ (sensors * scale + shift) - shift) / scale
    return x.index_copy(x.dim() - 2, channels, turned.flatten(-3, -2))


def _rotation(u: Tensor, most: float) -> Tensor:
    """cos a I + sin a [k]_x + (1 - cos a) k k^T: the rotation by an angle a about a direction k, [..., 3, 3]."""
    height, around = 2 * u[..., 0] - 1, 2 * pi * u[..., 1]
    radius = (1 - height * height).clamp_min(0).sqrt()
    k = torch.stack([radius * around.cos(), radius * around.sin(), height], -1)
    angle = (most * (2 * u[..., 2] - 1))[..., None, None]
    x, y, z = k.unbind(-1)
    none = torch.zeros_like(x)
    cross = torch.stack([none, -z, y, z, none, -x, -y, x, none], -1).unflatten(-1, (3, 3))
    eye = torch.eye(3, dtype=u.dtype, device=u.device)
    return angle.cos() * eye + angle.sin() * cross + (1 - angle.cos()) * k[..., :, None] * k[..., None, :]


@cache
def _axes_tensors(axes: tuple[Axes, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Channels of all sensors, and what their readings were normalised by, [sensors, 3, 1]."""
    channels = torch.tensor([c for each in axes for c in each.channels], device=device)
    shift, scale = (
        torch.tensor(numbers, dtype=dtype, device=device)[..., None]
        for numbers in ([each.shift for each in axes], [each.scale for each in axes])
    )
    return channels, shift, scale


def normalised_axes(
    triples: Sequence[tuple[int, int, int]], shift: Sequence[float], scale: Sequence[float]
) -> tuple[Axes, ...]:
    """Axes with the normalisation of their channels; `shift` and `scale` have a number for every channel."""
    return tuple(
        Axes(
            (a, b, c),
            (float(shift[a]), float(shift[b]), float(shift[c])),
            (float(scale[a]), float(scale[b]), float(scale[c])),
        )
        for a, b, c in triples
    )
