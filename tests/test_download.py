"""Published files: found, downloaded, checked and kept; every way a download fails leaves one line and no file."""

import errno
import gzip
import io
import os
import socket
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fedcpsl.data import download
from fedcpsl.data.download import PUBLISHED, cache_folder, download_folder, download_url, find_or_download

from .loopback import files_in, published, refusal, send, server

CONTENT = bytes(range(256)) * 3000  # more than one chunk


def test_a_file_is_downloaded_once(cache, monkeypatch):
    with server({"/set/some-file.gz": CONTENT}) as (base, seen):
        monkeypatch.setenv("FEDCPSL_MIRROR", base + "/")
        paths = [find_or_download("set", [], published(CONTENT, size=len(CONTENT))) for _ in range(2)]
    assert paths == [cache / "set" / "some-file.gz"] * 2
    assert paths[0].read_bytes() == CONTENT
    assert files_in(cache) == ["set/some-file.gz"]
    assert [path for path, _ in seen] == ["/set/some-file.gz"]
    assert seen[0][1].startswith("fedcpsl/")


def test_without_a_mirror_the_authors_are_asked(cache):
    with server({"/theirs.gz": CONTENT}) as (base, _):
        path = find_or_download("set", [], published(CONTENT, url=f"{base}/theirs.gz"))
    assert path.read_bytes() == CONTENT
    assert path.parent == cache / "set"


def test_a_server_need_not_say_the_length(cache, monkeypatch):
    with server({"/set/some-file.gz": lambda handler: send(handler, CONTENT, None)}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        assert find_or_download("set", [], published(CONTENT)).read_bytes() == CONTENT
    assert files_in(cache) == ["set/some-file.gz"]


def test_a_mirror_may_be_a_folder(cache, monkeypatch, tmp_path):
    (tmp_path / "mirror" / "set").mkdir(parents=True)
    (tmp_path / "mirror" / "set" / "some-file.gz").write_bytes(CONTENT)
    monkeypatch.setenv("FEDCPSL_MIRROR", (tmp_path / "mirror").as_uri())
    assert find_or_download("set", [], published(CONTENT)).parent == cache / "set"


@pytest.mark.parametrize("place", ["set/some-file.gz", "set/some-file", "some-file.gz", "some-file"])
def test_your_own_file_comes_first_and_is_taken_as_it_is(cache, tmp_path, place):
    path = tmp_path / "second" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    assert find_or_download("set", [tmp_path / "first", tmp_path / "second"], published(CONTENT)) == path
    assert not cache.exists()


def test_a_file_put_into_the_cache_by_hand_is_found(cache):
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "some-file").write_bytes(b"by hand")
    assert find_or_download("set", [], published(CONTENT)) == cache / "set" / "some-file"


def test_files_of_the_same_name_are_told_apart(cache, monkeypatch, tmp_path):
    """MNIST's and Fashion-MNIST's files are named alike; lying about, one is not taken for the other."""
    ours, other = published(b"ours"), published(b"other")
    monkeypatch.setattr(download, "PUBLISHED", {"set": {"images": ours}, "other": {"images": other}})
    (tmp_path / "some-file.gz").write_bytes(b"other")
    assert find_or_download("other", [tmp_path], other) == tmp_path / "some-file.gz"
    with server({"/set/some-file.gz": b"ours"}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        assert find_or_download("set", [tmp_path], ours) == cache / "set" / "some-file.gz"


def cut_short(handler):
    send(handler, CONTENT[:1000], len(CONTENT))


def closes_midway(handler):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"1000\r\n" + CONTENT[:100])


def resets(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT[:100])
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    handler.connection.close()


BAD_PAGES = {
    "missing": (None, "the server replied 404"),
    "broken server": (lambda handler: handler.send_error(503), "the server replied 503"),
    "cut short": (cut_short, f"only 1000 of {len(CONTENT)} bytes"),
    "closed midway": (closes_midway, "IncompleteRead"),
    "reset": (resets, ""),
    "corrupted": (b"x" + CONTENT[1:], "not the published file"),
    "empty": (b"", "not the published file"),
    "too long": (CONTENT + b"x" * 1000, "more than the published"),
    "not a web server": (lambda handler: handler.wfile.write(b"go away\r\n\r\n"), ""),
    "round and round": (
        lambda h: (h.send_response(302), h.send_header("Location", h.path), h.end_headers()),
        "the server replied 302",
    ),
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_a_bad_download_leaves_one_line_and_no_file(cache, monkeypatch, tmp_path, case):
    page, why = BAD_PAGES[case]
    with server({"/set/some-file.gz": page}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        message = refusal(lambda: find_or_download("set", [tmp_path / "data"], published(CONTENT, size=len(CONTENT))))
    assert f"{base}/set/some-file.gz: cannot be downloaded" in message
    assert why in message
    for fix in (str(tmp_path / "data" / "set"), "FEDCPSL_DATA", "FEDCPSL_MIRROR"):
        assert fix in message
    assert files_in(cache) == []


def test_a_silent_server(cache, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    done = threading.Event()
    with server({"/set/some-file.gz": lambda _: done.wait(10)}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        message = refusal(lambda: find_or_download("set", [], published(CONTENT)))
        done.set()
    assert "timed out" in message
    assert str(cache / "set") in message
    assert files_in(cache) == []


def test_no_server(cache, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("FEDCPSL_MIRROR", f"http://127.0.0.1:{port}")
    assert "refused" in refusal(lambda: find_or_download("set", [], published(CONTENT)))
    assert files_in(cache) == []


def test_no_network(cache, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    message = refusal(lambda: find_or_download("mnist", [], PUBLISHED["mnist"]["images"]))
    assert message.startswith("https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz: cannot be")
    assert "Name or service not known" in message
    assert files_in(cache) == []


@pytest.mark.parametrize("mirror", ["mirror.example", "gopher://mirror.example", "http://mirror example", "http://["])
def test_an_invalid_url(cache, monkeypatch, mirror):
    monkeypatch.setenv("FEDCPSL_MIRROR", mirror)
    assert "FEDCPSL_MIRROR" in refusal(lambda: find_or_download("set", [], published(CONTENT)))
    assert files_in(cache) == []


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "file" / "cache"))
    message = refusal(lambda: find_or_download("set", [], published(CONTENT, url="http://127.0.0.1:9/theirs.gz")))
    for part in (str(tmp_path / "file" / "cache"), "http://127.0.0.1:9/theirs.gz", "FEDCPSL_CACHE", "FEDCPSL_DATA"):
        assert part in message


def test_a_full_disk(cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with server({"/set/some-file.gz": CONTENT}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        message = refusal(lambda: find_or_download("set", [], published(CONTENT)))
    assert "No space left" in message
    assert f"{base}/set/some-file.gz" in message
    assert files_in(cache) == []


def test_an_interrupted_download_leaves_nothing(cache, monkeypatch):
    @contextmanager
    def interrupted(*_):
        def advance(_):
            raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(download, "bytes_bar", interrupted)
    with server({"/set/some-file.gz": CONTENT}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        with pytest.raises(KeyboardInterrupt):
            find_or_download("set", [], published(CONTENT))
    assert files_in(cache) == []


def test_what_a_killed_process_left_goes_after_a_day(cache, monkeypatch):
    old, new = cache / "set" / ".old.partial", cache / "set" / ".new.partial"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "some-file.gz").write_bytes(b"half")
    os.utime(old, (time.time() - 2 * download.DAY,) * 2)
    with server({"/set/some-file.gz": CONTENT}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        find_or_download("set", [], published(CONTENT))
    assert not old.exists()
    assert new.exists()


def test_two_at_once_do_not_disturb_each_other(cache, monkeypatch):
    together = threading.Barrier(2, timeout=10)

    def page(handler):
        together.wait()
        send(handler, CONTENT, len(CONTENT))

    with server({"/set/some-file.gz": page}) as (base, seen), ThreadPoolExecutor(2) as pool:
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        paths = list(pool.map(lambda _: find_or_download("set", [], published(CONTENT)), range(2)))
    assert len(seen) == 2
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert files_in(cache) == ["set/some-file.gz"]


def archive(members, packed=True):
    """A .tar.gz with these files; a member given as None is a symbolic link."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            entry.size = len(content or b"")
            tar.addfile(entry, io.BytesIO(content or b""))
    return gzip.compress(raw.getvalue(), mtime=0) if packed else raw.getvalue()


WHOLE = {"inner/a.bin": b"A" * 5000, "inner/b.bin": b"B" * 70}


def unpacked(content, monkeypatch, folders=()):
    with server({"/set/all.tar.gz": content}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        return download_folder("set", folders, published(content, "all.tar.gz"), "inner", ("a.bin", "b.bin"))


def test_an_archive_is_unpacked_and_not_kept(cache, monkeypatch):
    strange = {"../outside": b"x", "/tmp/absolute": b"x", "inner/../../up": b"x", "inner/other": b"x", "a.bin": b"x"}
    folder = unpacked(archive(strange | WHOLE), monkeypatch)
    assert folder == cache / "set" / "inner"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.bin": b"A" * 5000, "b.bin": b"B" * 70}
    assert files_in(cache.parent) == ["cache/set/inner/a.bin", "cache/set/inner/b.bin"]


def test_a_folder_that_lost_a_file_is_replaced(cache, monkeypatch):
    unpacked(archive(WHOLE), monkeypatch)
    (cache / "set" / "inner" / "b.bin").unlink()
    (cache / "set" / "inner" / "a.bin").write_bytes(b"damaged")
    unpacked(archive(WHOLE), monkeypatch)
    assert (cache / "set" / "inner" / "a.bin").read_bytes() == b"A" * 5000
    assert files_in(cache) == ["set/inner/a.bin", "set/inner/b.bin"]


def test_a_folder_that_another_process_made_meanwhile_stays(cache, monkeypatch):
    (cache / "set" / "inner").mkdir(parents=True)
    for name in ("a.bin", "b.bin"):
        (cache / "set" / "inner" / name).write_bytes(b"theirs")
    unpacked(archive(WHOLE), monkeypatch)
    assert (cache / "set" / "inner" / "a.bin").read_bytes() == b"theirs"
    assert files_in(cache) == ["set/inner/a.bin", "set/inner/b.bin"]


@pytest.mark.parametrize(
    "content",
    [
        archive({"inner/a.bin": b"A"}),
        archive({"inner/a.bin": b"A", "inner/b.bin": None}),
        archive(WHOLE)[:-40],
        archive(WHOLE)[:20] + b"\xff" * 500,
        archive(WHOLE, packed=False),
        b"no archive",
    ],
    ids=["incomplete", "a link", "cut short", "damaged", "not compressed", "no archive"],
)
def test_a_bad_archive_leaves_nothing(cache, monkeypatch, content):
    message = refusal(lambda: unpacked(content, monkeypatch))
    assert "/set/all.tar.gz: its archive" in message
    assert files_in(cache) == []


def test_a_bad_download_of_an_archive_says_where_to_unpack_it(cache, monkeypatch, tmp_path):
    with server({}) as (base, _):
        monkeypatch.setenv("FEDCPSL_MIRROR", base)
        message = refusal(lambda: download_folder("set", [tmp_path], published(b"", "all.tar.gz"), "inner", ("a.bin",)))
    assert f"unpack it in {tmp_path / 'set'}" in message
    assert files_in(cache) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCPSL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "fedcpsl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fedcpsl"
    monkeypatch.setenv("FEDCPSL_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_the_published_files_are_well_formed(monkeypatch):
    monkeypatch.delenv("FEDCPSL_MIRROR", raising=False)
    every = [(dataset, file) for dataset, files in PUBLISHED.items() for file in files.values()]
    for dataset, file in every:
        assert len(bytes.fromhex(file.md5)) == 16
        assert file.url.endswith("/" + file.name)
        assert file.size > 0
        assert download_url(dataset, file) == file.url
    assert len({file.md5 for _, file in every}) == len(every)
