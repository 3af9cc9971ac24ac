"""Readers of files: .npz archives, folders device/label/*.png, and CSV in its common variants: commas, semicolons or
tabs, decimal commas, gzip, a byte order mark. Nothing in a file is executed."""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Source, array_source, natural_key
from fedcpsl.data.notes import note, note_classes, note_devices, note_images, note_inputs, track
from fedcpsl.errors import InputError

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
UNLABELLED_FOLDERS = ("unlabelled", "unlabeled")  # in any case
SNIFFED_LINES = 200
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_NOT_A_NUMBER = re.compile(r"In CSV column #(\d+): (?:Row #(\d+): )?.* invalid value '(.*)'", re.S)


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


def read_npz(path: Path, *, devices_needed: bool, labels_needed: bool = True) -> Source:
    """Read your own arrays: `x`, `y` (-1 where unlabelled), `device`, and optionally `test` and `recording`."""
    arrays = read_archive(path)
    for name in ("x", "y", "device") if devices_needed else ("x", "y"):
        if name not in arrays:
            raise InputError(f"{path}: has no array {name!r} (it has {', '.join(arrays) or 'none'}); add it")
    try:
        others = (arrays.get(name) for name in ("device", "test", "recording"))
        source = array_source(arrays["x"], arrays["y"], *others, labels_needed=labels_needed)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    note_inputs(path.name, source.x)
    note_classes(path.name, source.class_names)
    return source


def read_image_folder(folder: Path, side: int = 0, *, one_device: bool = False) -> Source:
    """Read device/label/*.png, and device/unlabelled/ for images without a label; label/*.png of one device.

    Images are bytes [samples, channels, height, width]: one channel if all are grey, else three. They are scaled to
    squares of `side` pixels, if it is given.
    """
    files = _image_files(folder, one_device=one_device)
    devices = sorted({device for device, _, _ in files}, key=natural_key)
    classes = sorted({label for _, label, _ in files if not is_unlabelled(label)}, key=natural_key)
    if not classes and not one_device:
        raise InputError(f"{folder}: no image has a label; put some into {folder}/DEVICE/LABEL/")
    paths = [path for _, _, path in files]
    if side:
        images = read_images(paths, (side, side))
    else:
        note_images(folder.name, _pixels(paths[0], None).shape)
        images = read_images(paths, fix="make all images the same size, or give --set data.image_size=64")
    if not one_device:
        note_devices(folder.name, devices, len(files))
        note_classes(folder.name, classes, sum(not is_unlabelled(label) for _, label, _ in files))
    elif len(devices) > 1:
        note(f"{folder.name}: the images of {', '.join(devices)} are taken together, as those of one device")
    class_number = {name: i for i, name in enumerate(classes)}
    device_number = {name: i for i, name in enumerate(devices)}
    return Source(
        images,
        np.array([class_number.get(label, -1) for _, label, _ in files], np.int64),
        tuple(classes),
        np.array([device_number[device] for device, _, _ in files], np.int64),
        tuple(devices),
    )


def is_unlabelled(folder: str) -> bool:
    """Return whether the images of a folder of this name have no label."""
    return folder.lower() in UNLABELLED_FOLDERS


def images_in(folder: Path) -> list[Path]:
    """Return the images anywhere in a folder, sorted by name."""
    return [path for path in _visible_files(folder) if path.suffix.lower() in IMAGE_FILES]


def _visible_files(folder: Path) -> list[Path]:
    """Return the files anywhere in a folder, without hidden ones, which systems leave behind."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _image_files(folder: Path, *, one_device: bool) -> list[tuple[str, str, Path]]:
    """Return (device, label, file) of every image, sorted by name."""
    files = []
    for path in _visible_files(folder):
        parts = path.relative_to(folder).parts
        if path.suffix.lower() not in IMAGE_FILES:
            raise InputError(f"{path}: not an image ({', '.join(IMAGE_FILES)}); move it elsewhere")
        parts = ("", *parts) if one_device and len(parts) == 2 else parts
        if len(parts) != 3:
            raise InputError(f"{path}: images belong into {folder}/DEVICE/LABEL/ or {folder}/DEVICE/unlabelled/")
        files.append((parts[0], parts[1], path))
    if not files:
        raise InputError(f"{folder}: has no images; put them into {folder}/DEVICE/LABEL/")
    return files


def read_images(
    paths: list[Path], size: tuple[int, int] | None = None, fix: str = "make all images the same size"
) -> NDArray[np.uint8]:
    """Read images of one size as bytes [samples, 1 or 3, height, width], or of any, scaled to a height and width.

    `fix` is the advice where they have several sizes.
    """
    pixels = [_pixels(path, size) for path in track(paths, "reading images")]
    shape = pixels[0].shape[:2]
    for path, image in zip(paths, pixels, strict=True):
        if image.shape[:2] != shape:
            raise InputError(
                f"{path}: is {image.shape[1]} x {image.shape[0]} where {paths[0]} is {shape[1]} x {shape[0]}; {fix}"
            )
    grey = all(image.ndim == 2 for image in pixels)
    stacked = np.empty((len(pixels), 1 if grey else 3, *shape), np.uint8)
    for i, image in enumerate(pixels):
        stacked[i] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    return stacked


def as_colour(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images with three channels, grey ones with three equal ones."""
    return images if images.shape[1] == 3 else np.repeat(images, 3, 1)


def _pixels(path: Path, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Read one image: grey ones as [height, width], others as [height, width, 3]; its middle, scaled to a size."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)  # as it was taken, not as its camera lay
            if image.mode == "F":
                raise ValueError("its pixels are floating-point numbers")
            if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would clip at 255
                plain = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
            else:
                plain = _on_white(image).convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            return np.asarray(plain if size is None else ImageOps.fit(plain, size[::-1]))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: not a readable image ({error}); replace or remove it") from error


def _on_white(image: Any) -> Any:
    """Return an image without transparency: what is under transparent pixels is not seen."""
    from PIL import Image

    if image.mode not in ("LA", "RGBA", "PA") and "transparency" not in image.info:
        return image
    above = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), above)


class Dialect(NamedTuple):
    """The separator of a file's cells, and the decimal point of its numbers."""

    delimiter: str
    decimal_point: str = "."


class NotANumber(NamedTuple):
    """A cell of a numeric column that pyarrow could not parse."""

    column: int
    row: int | None  # from 1, without the header
    value: str


def kind_of(path: Path) -> str:
    """Return the suffix that gives a file's format, also if it is compressed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes or [""])[-1]


@contextmanager
def _lines(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        yield file


def dialect_of(path: Path) -> Dialect:
    """Detect the dialect from the header and the first rows."""
    with _lines(path) as file:
        header, *rows = list(islice(file, SNIFFED_LINES)) or [""]
    if kind_of(path) == ".tsv":
        delimiter = "\t"
    else:
        delimiter = max(",;\t", key=header.count) if any(c in header for c in ",;\t") else ","
    if delimiter == ",":
        return Dialect(delimiter)
    cells = [cell.strip() for row in csv.reader(rows, delimiter=delimiter) for cell in row]
    return Dialect(delimiter, "," if any(_DECIMAL_COMMA.fullmatch(cell) for cell in cells) else ".")


def header_of(path: Path) -> list[str]:
    """Return the columns' names."""
    with _lines(path) as file:
        names = next(csv.reader(file, delimiter=dialect_of(path).delimiter), [])
    if not names:
        raise InputError("the file is empty: give a header with the columns' names, then a row per sample")
    return names


def batches_of(path: Path, names: Sequence[str], text_columns: set[str]) -> Any:
    """Return a reader of batches of rows: text columns as text, all others as numbers."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    delimiter, decimal_point = dialect_of(path)
    types = {name: pa.string() if name in text_columns else pa.float32() for name in names}
    convert = arrow_csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, decimal_point=decimal_point
    )
    return arrow_csv.open_csv(
        pa.input_stream(str(path), compression="detect"),
        read_options=arrow_csv.ReadOptions(block_size=8 << 20, column_names=list(names), skip_rows=1),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=False),
        convert_options=convert,
    )


def not_a_number(error: Exception) -> NotANumber | None:
    """Return the cell that an error of pyarrow is about; None if it is about something else."""
    found = _NOT_A_NUMBER.search(str(error))
    if found is None:
        return None
    column, row, value = found.groups()
    return NotANumber(int(column), int(row) - 1 if row else None, value)


def check_text_column(path: Path, names: Sequence[str], name: str) -> None:
    """Raise InputError if some cells of a text column are numbers: then the others are probably errors."""
    numbers, first, row = False, None, 0
    for batch in batches_of(path, names, set(names)):
        for cell in batch.column(name).to_pylist():
            row += 1
            if cell is not None and is_number(cell):
                numbers = True
            elif cell is not None and first is None:
                first = f"{cell!r} in row {row}"
            if numbers and first:
                advice = "correct it, encode it, or leave it out (--drop)"
                raise InputError(f"column {name!r} has {first}, not a number: {advice}")


def is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True
