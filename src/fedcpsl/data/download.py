"""The files of published data sets: from your folders or the cache, else downloaded, checked and cached."""

import hashlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from gzip import BadGzipFile
from pathlib import Path
from typing import NamedTuple

from fedcpsl import __version__
from fedcpsl.data.notes import bytes_bar
from fedcpsl.errors import InputError

TIMEOUT = 30.0  # seconds without a reply of the server
CHUNK = 1 << 18
DAY = 86400.0


class Published(NamedTuple):
    """A file as its authors publish it; `size` in bytes, 0 if unknown."""

    name: str
    md5: str
    url: str
    size: int = 0


def _from(base: str, name: str, md5: str, size: int) -> Published:
    return Published(name, md5, base + name, size)


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_IMAGES, _LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_TEST_IMAGES, _TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"

PUBLISHED = {
    "mnist": {
        "images": _from(_MNIST, _IMAGES, "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        "labels": _from(_MNIST, _LABELS, "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        "test images": _from(_MNIST, _TEST_IMAGES, "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        "test labels": _from(_MNIST, _TEST_LABELS, "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    },
    "fashion-mnist": {
        "images": _from(_FASHION, _IMAGES, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        "labels": _from(_FASHION, _LABELS, "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        "test images": _from(_FASHION, _TEST_IMAGES, "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        "test labels": _from(_FASHION, _TEST_LABELS, "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    },
    "cifar10": {
        "archive": _from(_CIFAR, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
    },
}


class _DownloadError(Exception):
    """The reason why a download failed."""


def find_or_download(dataset: str, folders: Sequence[Path], file: Published) -> Path:
    """Return the file in one of your folders (also decompressed) or in the cache; else download it.

    Your own file is used as it is: its reader checks it. Only checked files are written to the cache.
    """
    existing = find_file(dataset, folders, file)
    if existing:
        return existing
    home = cache_folder() / dataset
    url = download_url(dataset, file)
    with _temporary_folder(home, url) as temporary:
        _download(url, file, temporary / file.name, f"download it by hand into {_manual_folder(dataset, folders)}")
        (temporary / file.name).replace(home / file.name)
    return home / file.name


def find_file(dataset: str, folders: Sequence[Path], file: Published) -> Path | None:
    """Return where the file is on this machine, or None."""
    names = (file.name, file.name.removesuffix(".gz"))
    for folder in folders:
        for path in (folder / sub / name for sub in (dataset, "") for name in names):
            if os.path.isfile(path) and not (path.parent == folder and _is_of_other_dataset(path, dataset)):
                return path
    cached = (cache_folder() / dataset / name for name in names)
    return next((path for path in cached if os.path.isfile(path)), None)


def download_folder(dataset: str, folders: Sequence[Path], file: Published, name: str, members: Sequence[str]) -> Path:
    """Download an archive and cache these members of its folder `name`, all of them or none."""
    url, target = download_url(dataset, file), cache_folder() / dataset / name
    with _temporary_folder(target.parent, url) as temporary:
        advice = f"download it by hand and unpack it in {_manual_folder(dataset, folders)}"
        _download(url, file, temporary / file.name, advice)
        _unpack(temporary / file.name, temporary / name, members, url)
        _install(temporary / name, target, members, temporary / "replaced")
    return target


def cache_folder() -> Path:
    """Return FEDCPSL_CACHE, else fedcpsl/ in the user's cache folder."""
    given, shared = os.environ.get("FEDCPSL_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if given:
            return Path(given).expanduser()
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "fedcpsl"
    except RuntimeError:
        raise InputError("no home folder to cache data sets in; set FEDCPSL_CACHE to a folder") from None


def download_url(dataset: str, file: Published) -> str:
    """Return the URL of the file: that of its authors, or the same file on your mirror."""
    mirror = os.environ.get("FEDCPSL_MIRROR", "")
    return f"{mirror.rstrip('/')}/{dataset}/{file.name}" if mirror else file.url


def _manual_folder(dataset: str, folders: Sequence[Path]) -> Path:
    return (folders[0] if folders else cache_folder()) / dataset


def _is_of_other_dataset(path: Path, dataset: str) -> bool:
    """Whether a file is another data set's: MNIST and Fashion-MNIST use the same file names."""
    others = [
        f.md5 for name, files in PUBLISHED.items() if name != dataset for f in files.values() if f.name == path.name
    ]
    if not others:
        return False
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest() in others
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make it readable") from error


@contextmanager
def _temporary_folder(home: Path, url: str) -> Iterator[Path]:
    """Create a temporary folder in the cache and remove it at the end: partial files are never visible."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        for old in home.glob(".*.partial"):  # of a process that was killed
            with suppress(FileNotFoundError):
                if time.time() - old.stat().st_mtime > DAY:
                    shutil.rmtree(old, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=home))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"{home}: {url} cannot be stored there ({error.strerror or error}); make room or set FEDCPSL_CACHE to "
            "another folder, or download it by hand and set FEDCPSL_DATA to its folder"
        ) from error


def _download(url: str, file: Published, path: Path, advice: str) -> None:
    try:
        with closing(_downloaded_chunks(url, file)) as chunks:
            _write(path, chunks)
    except _DownloadError as why:
        raise InputError(
            f"{url}: cannot be downloaded ({why}); {advice}, or set FEDCPSL_DATA to a folder that has it "
            "or FEDCPSL_MIRROR to another server"
        ) from why


def _downloaded_chunks(url: str, file: Published) -> Generator[bytes]:
    """Yield the file's bytes as the server sends them; _DownloadError at the end if it is not the published file."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    digest, received = hashlib.md5(usedforsecurity=False), 0
    try:
        request = Request(url, headers={"User-Agent": f"fedcpsl/{__version__}"})
        with urlopen(request, timeout=TIMEOUT) as response:
            announced = response.headers.get("Content-Length") or ""
            length = int(announced) if announced.isdecimal() else None
            with bytes_bar(file.name, length or file.size or None) as advance:
                while chunk := response.read(CHUNK):
                    digest.update(chunk)
                    received += len(chunk)
                    if file.size and received > file.size:
                        raise _DownloadError(f"more than the published {file.size} bytes received")
                    advance(len(chunk))
                    yield chunk
    except HTTPError as error:
        error.close()
        raise _DownloadError(_one_line(f"the server replied {error.code} {error.reason}")) from error
    except (OSError, HTTPException, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise _DownloadError(_one_line(str(getattr(why, "strerror", None) or why)) or type(why).__name__) from error
    if length is not None and received != length:
        raise _DownloadError(f"only {received} of {length} bytes received")
    if digest.hexdigest() != file.md5:
        raise _DownloadError(f"it is not the published file: its MD5 is {digest.hexdigest()}, not {file.md5}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    with path.open("xb") as out:
        for chunk in chunks:
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())  # before it gets its final name


def _unpack(archive: Path, target: Path, members: Sequence[str], url: str) -> None:
    """Write the named members; paths in the archive are compared, never used as paths."""
    import tarfile

    target.mkdir()
    missing = {f"{target.name}/{member}": member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                content = tar.extractfile(entry) if entry.isreg() and entry.name in missing else None
                if content:
                    _write(target / missing.pop(entry.name), iter(partial(content.read, CHUNK), b""))
    except (tarfile.TarError, BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{url}: its archive cannot be read ({_one_line(str(error))}); set FEDCPSL_MIRROR to another server"
        ) from error
    if missing:
        raise InputError(f"{url}: its archive has no {next(iter(missing))}; set FEDCPSL_MIRROR to another server")


def _install(new: Path, target: Path, members: Sequence[str], aside: Path) -> None:
    """Rename a complete folder to its final name, unless another process was faster."""

    def complete() -> bool:
        return all(os.path.isfile(target / member) for member in members)

    if not complete():
        with suppress(OSError):
            target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        if not complete():
            raise
