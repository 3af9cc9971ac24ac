"""CIFAR-10's two formats, small: every protocol of pickle is read, and nothing that a pickle asks for is done."""

import io
import pickle
import struct
import tarfile

import numpy as np
import pytest

from fedcpsl.data.cifar import BINARY, MEMBERS, PYTHON, TRAINING, read_binary_batch, read_cifar10, read_python_batch
from fedcpsl.data.sources import cifar10
from fedcpsl.errors import InputError

from .loopback import files_in, published, refusal, server


def samples(n=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), np.uint8), rng.integers(0, 10, n).tolist()


def as_binary(data, labels):
    return b"".join(bytes([y]) + x.tobytes() for x, y in zip(data, labels, strict=True))


def as_pickle(data, labels, protocol=2, text=False):
    batch = {b"batch_label": b"training batch 1 of 5", b"labels": labels, b"data": data, b"filenames": [b"a.png"] * 2}
    return pickle.dumps({k.decode(): v for k, v in batch.items()} if text else batch, protocol)


def as_python2(data, labels):
    """As Python 2 and an old numpy wrote the published batches: protocol 2, byte strings for everything."""

    def word(text, number):
        return b"U" + bytes([len(text)]) + text + b"q" + bytes([number])

    numbers = b"".join(b"K" + bytes([y]) for y in labels)
    raw = data.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
        + b"(K\x01M" + struct.pack("<H", len(data)) + b"M\x00\x0c\x86"
        + b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )  # fmt: skip
    return (
        b"\x80\x02}q\x01("
        + word(b"batch_label", 2) + word(b"training batch 1 of 5", 3)
        + word(b"labels", 4) + b"]q\x05(" + numbers + b"e"
        + word(b"data", 6) + array
        + word(b"filenames", 12) + b"]q\x0d(" + word(b"a.png", 14) + word(b"b.png", 15) + b"e"
        + b"u."
    )  # fmt: skip


def as_old_text(data, labels):
    """As Python 2 wrote protocol 0: one thing a line, bytes as escaped strings, long integers."""

    def word(raw):
        return b"S'" + b"".join(b"\\x%02x" % byte for byte in raw) + b"'\n"

    numbers = b"".join(b"L%dL\na" % y if y % 2 else b"I%d\na" % y for y in labels)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\np3\n(cnumpy\nndarray\np4\n(I0\ntp5\nS'b'\np6\ntp7\nRp8\n"
        + b"(I1\n(I%d\nL3072L\ntp9\n" % len(data)
        + b"cnumpy\ndtype\np10\n(S'u1'\np11\nI0\nI1\ntp12\nRp13\n(I3\nS'|'\np14\nNNNI-1\nI-1\nI0\ntp15\nb"
        + b"I00\n" + word(data.tobytes()) + b"p16\ntp17\nb"
    )  # fmt: skip
    return b"(dp0\nS'labels'\np1\n(lp2\n" + numbers + b"sS'data'\np18\n" + array + b"s."


def test_the_binary_format(tmp_path):
    data, labels = samples()
    (tmp_path / "b.bin").write_bytes(as_binary(data, labels))
    images, classes = read_binary_batch(tmp_path / "b.bin")
    assert images.shape == (4, 3, 32, 32)
    assert images.dtype == np.uint8
    assert classes.dtype == np.int64
    assert images.flags.writeable
    # red, green and blue planes one after the other, each row by row
    assert images[2, 1, 5, 7] == data[2, 1024 + 5 * 32 + 7]
    assert images.reshape(4, -1).tolist() == data.tolist()
    assert classes.tolist() == labels


@pytest.mark.parametrize(
    "content",
    [b"", b"\1" * 3072, b"\1" * 3074, b"\x0a" + bytes(3072)],
    ids=["empty", "short", "long", "class 10"],
)
def test_a_bad_binary_batch(tmp_path, content):
    (tmp_path / "b.bin").write_bytes(content)
    message = refusal(lambda: read_binary_batch(tmp_path / "b.bin"))
    assert message.startswith(f"{tmp_path / 'b.bin'}: ")
    assert "delete it and fetch it again" in message


def test_no_batch(tmp_path):
    for read in (read_binary_batch, read_python_batch):
        assert "cannot be read" in refusal(lambda read=read: read(tmp_path / "none"))


WRITERS = {
    **{f"protocol {p}": lambda d, y, p=p: as_pickle(d, y, p) for p in range(6)},
    **{f"protocol {p}, text keys": lambda d, y, p=p: as_pickle(d, y, p, text=True) for p in range(6)},
    **{f"protocol {p}, by column": lambda d, y, p=p: as_pickle(np.asfortranarray(d), y, p) for p in range(6)},
    **{
        f"protocol {p}, numpy 1": lambda d, y, p=p: as_pickle(d, y, p).replace(b"numpy._core", b"numpy.core")
        for p in range(4)  # later ones count the letters
    },
    "python 2": as_python2,
    "python 2, protocol 0": as_old_text,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_python_format(tmp_path, writer):
    data, labels = samples()
    (tmp_path / "batch").write_bytes(WRITERS[writer](data, labels))
    images, classes = read_python_batch(tmp_path / "batch")
    assert images.shape == (4, 3, 32, 32)
    assert images.dtype == np.uint8
    assert classes.dtype == np.int64
    assert images.flags.writeable
    assert images.reshape(4, -1).tolist() == data.tolist()
    assert classes.tolist() == labels


def test_the_hand_made_pickles_are_pickles():
    data, labels = samples()
    for raw in (as_python2(data, labels), as_old_text(data, labels).replace(b"numpy.core", b"numpy._core")):
        batch = pickle.loads(raw.replace(b"numpy.core", b"numpy._core"), encoding="latin1")
        assert batch["data"].tolist() == data.tolist()
        assert batch["labels"] == labels


class Deed:
    """Something that would happen if the pickle were loaded."""

    def __init__(self, function, *arguments):
        self.deed = function, arguments

    def __reduce__(self):
        return self.deed


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["alone", "data", "labels", "more"])
def test_nothing_in_a_pickle_is_executed(tmp_path, protocol, place):
    import os

    data, labels = samples()
    evil = Deed(os.system, f"touch {tmp_path / 'executed'}")
    batch = evil if place == "alone" else {"data": data, "labels": labels, place: evil}
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol))
    message = refusal(lambda: read_python_batch(tmp_path / "batch"))
    assert message.startswith(f"{tmp_path / 'batch'}: uses ")
    assert message.endswith(".system, which a CIFAR-10 batch does not; fetch the file again")
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


@pytest.mark.parametrize(
    "raw",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'1'\ni__builtin__\neval\n.",
        b"(cbuiltins\neval\nS'1'\no.",
        b"\x82\x01.",
        b"P1\n.",
        b"\x80\x04\x8c\x02a\n\x8c\x06\x1b[31m\n\x93.",
        b"\x80\x04K\x01K\x02\x93.",
        b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R.",
        b"\x80\x02cnumpy\nndarray\n)\x81}b.",
        b"\x80\x02}(K\x01K\x02u.",
        b"\x80\x02](a.",
        b"\x80\x02h\x05.",
        b"]N}b.",
        b"t.",
        b".",
        b"",
        b"\xff\xd8 no pickle",
        b"I" + b"9" * 9000 + b"\n.",
        b"T\xff\xff\xff\x7fabc",
    ],
)
def test_what_is_no_batch_is_refused(tmp_path, raw):
    (tmp_path / "batch").write_bytes(raw)
    message = refusal(lambda: read_python_batch(tmp_path / "batch"))
    assert message.isprintable()
    assert len(message) < len(str(tmp_path)) + 300
    assert "fetch the file again" in message


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"data": np.zeros((2, 3072), np.uint8)}, "has no 'data' and 'labels'"),
        ([1], "has no 'data' and 'labels'"),
        ({"data": [1, 2], "labels": [1, 2]}, "not an array"),
        ({"data": np.zeros((2, 3072), np.int8), "labels": [1, 2]}, "not an array of bytes"),
        ({"data": np.zeros((2, 3072), np.float32), "labels": [1, 2]}, "not an array of bytes"),
        ({"data": np.zeros((2, 1024), np.uint8), "labels": [1, 2]}, "not an array of n x 3072"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "not an array of n x 3072"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images but 1 labels"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}, "classes from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]}, "classes from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, True]}, "classes from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, "2"]}, "classes from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2.0]}, "BINFLOAT"),
        ({"data": np.zeros((2, 3072), object), "labels": [1, 2]}, "not an array of bytes"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_what_a_batch_must_have(tmp_path, batch, why, protocol):
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol))
    assert why in refusal(lambda: read_python_batch(tmp_path / "batch"))


def test_a_damaged_pickle_is_read_or_refused(tmp_path):
    """Cut anywhere, or with any byte changed, it never raises anything but the one line."""
    data, labels = samples(1)
    rng = np.random.default_rng(0)
    for protocol in (0, 2, 4, 5):
        raw = as_pickle(data, labels, protocol)
        head = raw.index(b"u1") + 60  # beyond it there are mostly pixels
        cuts = [raw[:at] for at in range(0, len(raw), 1 + len(raw) // 100)]
        changed = [raw[:at] + bytes([rng.integers(256)]) + raw[at + 1 :] for at in rng.integers(0, head, 300)]
        for broken in cuts + changed:
            (tmp_path / "batch").write_bytes(broken)
            try:
                images, _ = read_python_batch(tmp_path / "batch")
            except InputError:
                continue
            assert images.shape == (1, 3, 32, 32)


def write_batches(folder, suffix=""):
    folder.mkdir(parents=True)
    for number, name in enumerate(TRAINING):
        data, labels = samples(seed=number)
        content = as_binary(data, labels) if suffix else as_python2(data, labels)
        (folder / (name + suffix)).write_bytes(content)


def check_all(images, labels):
    expected = [samples(seed=number) for number in range(5)]
    assert images.shape == (20, 3, 32, 32)
    assert images.reshape(20, -1).tolist() == np.concatenate([data for data, _ in expected]).tolist()
    assert labels.tolist() == [y for _, classes in expected for y in classes]


@pytest.mark.parametrize("inner", [BINARY, PYTHON, "cifar10", f"cifar10/{BINARY}", f"cifar10/{PYTHON}", "."])
@pytest.mark.parametrize("suffix", [".bin", ""])
def test_batches_are_found(cache, tmp_path, inner, suffix):
    write_batches(tmp_path / "data" / inner, suffix)
    check_all(*read_cifar10([tmp_path / "elsewhere", tmp_path / "data"]))
    assert not cache.exists()


def test_the_test_images_are_another_batch(cache, tmp_path):
    write_batches(tmp_path / "cifar10" / BINARY, ".bin")
    data, labels = samples(seed=9)
    (tmp_path / "cifar10" / BINARY / "test_batch.bin").write_bytes(as_binary(data, labels))
    tests = cifar10([tmp_path], tests=True)
    assert tests.x.reshape(len(data), -1).tolist() == data.tolist()
    assert tests.y.tolist() == labels
    check_all(*read_cifar10([tmp_path]))
    assert not cache.exists()


def test_a_batch_is_missing(cache, tmp_path):
    write_batches(tmp_path / "cifar10" / BINARY, ".bin")
    (tmp_path / "cifar10" / BINARY / "data_batch_3.bin").unlink()
    message = refusal(lambda: read_cifar10([tmp_path]))
    assert message.startswith(str(tmp_path / "cifar10" / BINARY / "data_batch_3.bin"))
    assert not cache.exists()


def published_archive(tmp_path):
    write_batches(tmp_path / "made" / BINARY, ".bin")
    for name in ("test_batch.bin", "batches.meta.txt", "readme.html"):
        (tmp_path / "made" / BINARY / name).write_bytes(b"x")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        tar.add(tmp_path / "made" / BINARY, BINARY)
    return raw.getvalue()


def test_cifar10_is_downloaded_once_and_again_when_damaged(cache, tmp_path, monkeypatch):
    content = published_archive(tmp_path)
    archive = published(content, "cifar-10-binary.tar.gz")
    with server({"/cifar10/cifar-10-binary.tar.gz": content}) as (base, seen):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        check_all(*read_cifar10([], archive))
        check_all(*read_cifar10([tmp_path / "nothing"], archive))
        assert len(seen) == 1
        assert files_in(cache) == sorted(f"cifar10/{BINARY}/{name}" for name in MEMBERS)

        damaged = cache / "cifar10" / BINARY / "data_batch_2.bin"
        damaged.write_bytes(b"half")
        assert f"{damaged}: its 4 bytes" in refusal(lambda: read_cifar10([], archive))
        damaged.unlink()  # as the message says
        check_all(*read_cifar10([], archive))
        assert len(seen) == 2


def test_cifar10_cannot_be_downloaded(cache, tmp_path, monkeypatch):
    with server({"/cifar10/cifar-10-binary.tar.gz": b"something else"}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        message = refusal(lambda: read_cifar10([tmp_path]))
    assert f"{base}/cifar10/cifar-10-binary.tar.gz: cannot be downloaded" in message
    assert f"unpack it in {tmp_path / 'cifar10'}" in message
    assert files_in(cache) == []
