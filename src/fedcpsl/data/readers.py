"""Readers of arrays and images: .npz archives, and folders device/label/*.png. Nothing in a file is executed."""

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Source, array_source, natural_key
from fedcpsl.data.notes import note_classes, note_inputs
from fedcpsl.errors import InputError
from fedcpsl.progress import track

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
UNLABELLED_FOLDERS = ("unlabelled", "unlabeled")


def read_archive(path: Path) -> dict[str, NDArray[Any]]:
    """Read every array of an .npz file; InputError with the file's name and advice for anything else."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(f"{path}: a single array; give an .npz archive, as numpy.savez writes it")
            return {name: _read_array(path, archive, name) for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error) as error:
        why = "" if isinstance(error, ValueError) else f" ({error})"  # numpy's message would recommend pickle
        raise InputError(f"{path}: not a readable .npz archive{why}; write it again with numpy.savez") from error


def _read_array(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise InputError(f"{path}: {name} is an array of Python objects; give it as numbers") from error
    return array


def read_npz(path: Path, *, devices_needed: bool) -> Source:
    """Read your own arrays: `x`, `y` (-1 where unlabelled), `device`, and optionally `test` and `recording`."""
    arrays = read_archive(path)
    for name in ("x", "y", "device") if devices_needed else ("x", "y"):
        if name not in arrays:
            raise InputError(f"{path}: has no array {name!r} (it has {', '.join(arrays) or 'none'}); add it")
    try:
        others = (arrays.get(name) for name in ("device", "test", "recording"))
        source = array_source(arrays["x"], arrays["y"], *others)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    note_inputs(path.name, source.x)
    note_classes(path.name, source.class_names)
    return source


def read_image_folder(folder: Path) -> Source:
    """Read device/label/*.png, and device/unlabelled/ for images without a label.

    Images are bytes [samples, channels, height, width]: one channel if all are grey, else three.
    """
    files = _image_files(folder)
    devices = sorted({device for device, _, _ in files}, key=natural_key)
    classes = sorted({label for _, label, _ in files if label not in UNLABELLED_FOLDERS}, key=natural_key)
    if not classes:
        raise InputError(f"{folder}: no image has a label; put some into {folder}/DEVICE/LABEL/")
    images = read_images([path for _, _, path in files])
    class_number = {name: i for i, name in enumerate(classes)}
    device_number = {name: i for i, name in enumerate(devices)}
    return Source(
        images,
        np.array([class_number.get(label, -1) for _, label, _ in files], np.int64),
        tuple(classes),
        np.array([device_number[device] for device, _, _ in files], np.int64),
        tuple(devices),
    )


def _image_files(folder: Path) -> list[tuple[str, str, Path]]:
    """Return (device, label, file) of every image, sorted by name."""
    files = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_dir() or any(part.startswith(".") for part in parts):
            continue
        if path.suffix.lower() not in IMAGE_FILES:
            raise InputError(f"{path}: not an image ({', '.join(IMAGE_FILES)}); move it elsewhere")
        if len(parts) != 3:
            raise InputError(f"{path}: images belong into {folder}/DEVICE/LABEL/ or {folder}/DEVICE/unlabelled/")
        files.append((parts[0], parts[1], path))
    if not files:
        raise InputError(f"{folder}: has no images; put them into {folder}/DEVICE/LABEL/")
    return files


def read_images(paths: list[Path]) -> NDArray[np.uint8]:
    """Read images of one size as bytes [samples, 1 or 3, height, width]."""
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
    """Read one image: grey ones as [height, width], others as [height, width, 3]."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would clip at 255
                return (np.asarray(image).clip(0, 65535) // 257).astype(np.uint8)
            if image.mode == "F":
                raise ValueError("its pixels are floating-point numbers")
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: not a readable image ({error}); replace or remove it") from error
