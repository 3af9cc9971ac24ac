"""A folder of images: device/label/*.png, with device/unlabelled/ for those that nobody labelled."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.categorical import natural
from fedcpsl.data.federation import Source
from fedcpsl.errors import InputError
from fedcpsl.progress import track

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
UNLABELLED_FOLDERS = ("unlabelled", "unlabeled")


def read_image_folder(folder: Path) -> Source:
    """Images as bytes [samples, channels, height, width]: one channel where all are grey, else three."""
    found = _find(folder)
    devices = sorted({device for device, _, _ in found}, key=natural)
    classes = sorted({label for _, label, _ in found if label not in UNLABELLED_FOLDERS}, key=natural)
    if not classes:
        raise InputError(f"{folder}: no image has a label; put some into {folder}/DEVICE/LABEL/")
    images = read_images([path for _, _, path in found])
    number = {name: i for i, name in enumerate(classes)}
    place = {name: i for i, name in enumerate(devices)}
    return Source(
        images,
        np.array([number.get(label, -1) for _, label, _ in found], np.int64),
        tuple(classes),
        np.array([place[device] for device, _, _ in found], np.int64),
        tuple(devices),
    )


def _find(folder: Path) -> list[tuple[str, str, Path]]:
    """(device, label, file) of every image, in order of their names."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_dir() or any(part.startswith(".") for part in parts):
            continue
        if path.suffix.lower() not in IMAGE_FILES:
            raise InputError(f"{path}: not an image ({', '.join(IMAGE_FILES)}); move it elsewhere")
        if len(parts) != 3:
            raise InputError(f"{path}: images belong into {folder}/DEVICE/LABEL/ or {folder}/DEVICE/unlabelled/")
        found.append((parts[0], parts[1], path))
    if not found:
        raise InputError(f"{folder}: has no images; put them into {folder}/DEVICE/LABEL/")
    return found


def read_images(paths: list[Path]) -> NDArray[np.uint8]:
    """Images of one size as bytes [samples, 1 or 3, height, width]."""
    pixels = [_pixels(path) for path in track(paths, "reading images")]
    shape = pixels[0].shape[:2]
    for path, image in zip(paths, pixels, strict=True):
        if image.shape[:2] != shape:
            raise InputError(
                f"{path}: is {image.shape[1]} x {image.shape[0]} where {paths[0]} is {shape[1]} x {shape[0]}; "
                "make all images the same size"
            )
    grey = all(image.ndim == 2 for image in pixels)
    stacked = np.empty((len(pixels), 1 if grey else 3, *shape), np.uint8)
    for i, image in enumerate(pixels):
        stacked[i] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    return stacked


def _pixels(path: Path) -> NDArray[np.uint8]:
    """Grey images as [height, width], others as [height, width, 3]."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would cut off at 255
                return (np.asarray(image).clip(0, 65535) // 257).astype(np.uint8)
            if image.mode == "F":
                raise ValueError("its pixels are floating-point numbers")
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: not a readable image ({error}); replace or remove it") from error
