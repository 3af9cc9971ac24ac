"""Models as files: ONNX, PyTorch's .pt2 and safetensors, each with its manifest. No reader executes or unpickles."""

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.errors import InputError
from fedcpsl.export.model_manifest import KEY, About, opened, sealed

EXTRA_FILE = f"{KEY}.json"
NOT_SEALED = (f"extra/{EXTRA_FILE}", ".data/serialization_id")  # the manifest itself, and a number that follows
WEIGHTS = "data/weights/"
TYPES = {  # PyTorch's numbers for them in a .pt2
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}


class Weights(NamedTuple):
    """A file that has been read as tensors."""

    about: About
    tensors: dict[str, Tensor]


class Graph(NamedTuple):
    """A file that has been read as an ONNX graph."""

    about: About
    content: bytes


def onnx_file(about: About, graph: bytes) -> bytes:
    """An ONNX graph with the manifest among its metadata, where every runtime finds it."""
    return graph + _metadata(sealed(about, [graph]).encode())


def read_onnx(content: bytes, path: Path) -> Graph:
    """The manifest is what the file ends with, so that all before it can be checked byte by byte."""
    mark = _field(0x0A, KEY.encode()) + b"\x12"
    begin = content.rfind(mark)
    text = b"" if begin < 0 else _after_length(content[begin + len(mark) :])
    tail = _metadata(text)
    if begin < 0 or not content.endswith(tail):
        raise InputError(f"{path}: not an ONNX file that `fedcpsl export` wrote, or cut short; export it again")
    graph = content[: -len(tail)]
    return Graph(opened(text, [graph], path), graph)


def _metadata(text: bytes) -> bytes:
    """A ModelProto's metadata_props, as protobuf has it: field 14 with a key (1) and a value (2)."""
    return _field(0x72, _field(0x0A, KEY.encode()) + _field(0x12, text))


def _field(tag: int, content: bytes) -> bytes:
    length, size = bytearray(), len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([tag, *length, size]) + content


def _after_length(content: bytes) -> bytes:
    """What a protobuf length at the beginning says belongs to it."""
    size = shift = 0
    for place, byte in enumerate(content[:5]):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return content[place + 1 : place + 1 + size]
    return b""


def safetensors_file(about: About, tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name with the manifest as metadata."""
    from safetensors.torch import save

    own = {name: t.detach().clone().contiguous() for name, t in tensors.items()}
    return bytes(save(own, {KEY: sealed(about, _pieces(own))}))


def read_safetensors(content: bytes, path: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}); export it again") from error
    text = header.get("__metadata__", {}).get(KEY)
    if text is None:
        raise InputError(f"{path}: has no manifest of fedcpsl; give a file that `fedcpsl export` wrote")
    _refuse_a_runs_own(text, path)
    return Weights(opened(text, _pieces(tensors), path), tensors)


def _refuse_a_runs_own(text: str, path: Path) -> None:
    """A run's folder has such files too, with other metadata."""
    with suppress(ValueError, TypeError):
        if "numbers" in json.loads(text):
            raise InputError(
                f"{path}: is a run's models file, not an exported model; give the run's folder with --device NAME"
            )


def _pieces(tensors: Mapping[str, Tensor]) -> Iterable[bytes]:
    for name in sorted(tensors):
        t = tensors[name]
        yield f"{name} {t.dtype} {list(t.shape)}".encode()
        yield t.flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b""


def torch_file(about: About, program: torch.export.ExportedProgram) -> bytes:
    """PyTorch's archive of an exported program, with the manifest as an extra file."""
    text = sealed(about, _members(_members_of(_archive(program, {}), Path("the program"))))
    return _archive(program, {EXTRA_FILE: text})


def _archive(program: torch.export.ExportedProgram, extra: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.export.save(program, content, extra_files=extra)
    return content.getvalue()


def read_torch(content: bytes, path: Path) -> Weights:
    """The weights of a .pt2, as numbers.

    `torch.export.load` would unpickle whatever the file calls a pickle, and evaluates expressions from it; so the
    program itself is left to those who trust the file.
    """
    members = _members_of(content, path)
    if f"extra/{EXTRA_FILE}" not in members:
        raise InputError(f"{path}: has no manifest of fedcpsl; give a file that `fedcpsl export` wrote")
    about = opened(members[f"extra/{EXTRA_FILE}"], _members(members), path)
    try:
        config = json.loads(members[f"{WEIGHTS}model_weights_config.json"])["config"]
        return Weights(about, {name: _tensor(payload, members) for name, payload in config.items()})
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{path}: holds no plain weights ({error}); --format torch needs a newer PyTorch") from error


def _tensor(payload: dict[str, Any], members: Mapping[str, bytes]) -> Tensor:
    if payload["use_pickle"]:
        raise ValueError("one is a pickle, which is never loaded")
    meta = payload["tensor_meta"]
    sizes, strides = ([int(n["as_int"]) for n in meta[name]] for name in ("sizes", "strides"))
    raw = torch.frombuffer(bytearray(members[WEIGHTS + payload["path_name"]]), dtype=TYPES[meta["dtype"]])
    return raw.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()


def _members_of(content: bytes, path: Path) -> dict[str, bytes]:
    """The files of an archive, without the folder that all are in."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("PyTorch compresses nothing in it")
            if content[-22:-18] != b"PK\5\6":
                raise ValueError("something was added to its end")
            members = {name.partition("/")[2]: archive.read(name) for name in names}
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise InputError(f"{path}: not a readable .pt2 archive ({error}); export it again") from error
    if len(members) < len(names):
        raise InputError(f"{path}: corrupt (a file is in it twice); export it again")
    return members


def _members(members: Mapping[str, bytes]) -> Iterable[bytes]:
    for name in sorted(set(members) - set(NOT_SEALED)):
        yield name.encode()
        yield members[name]
