"""A split as a file: who holds each sample and what for, to look at, share and use again."""

import io
from pathlib import Path

import numpy as np

from fedcpsl.data.federation import Federation, Source, digest_of, with_roles
from fedcpsl.data.npz import read_archive
from fedcpsl.data.roles import ROLES
from fedcpsl.errors import InputError


def split_bytes(source: Source, federation: Federation) -> bytes:
    """An .npz archive of the split: for every sample of a placed source its device (-1: nobody) and role."""
    assert source.device is not None
    held = source.device >= 0
    device = np.full(len(source.y), -1, np.int64)
    role = np.full(len(source.y), -1, np.int8)
    device[held], role[held] = federation.device, federation.role
    content = io.BytesIO()
    np.savez_compressed(
        content,
        device=device,
        role=role,
        names=np.array(federation.names),
        samples_sha256=np.array(digest_of(source.x, source.y)),
    )
    return content.getvalue()


def reuse_split(path: Path, source: Source, *, normalise: bool) -> Federation:
    """The federation that a saved split describes; refused where it was made for other samples."""
    arrays = read_archive(path)
    missing = [name for name in ("device", "role", "names", "samples_sha256") if name not in arrays]
    if missing:
        raise InputError(f"{path}: not a saved split (it has no {missing[0]!r}); make one with `fedcpsl data --save`")
    device, role = arrays["device"], arrays["role"]
    if str(arrays["samples_sha256"]) != digest_of(source.x, source.y):
        raise InputError(f"{path}: this split was made for other samples; make one with `fedcpsl data --save`")
    whole = device.dtype.kind == role.dtype.kind == "i" and device.shape == role.shape == source.y.shape
    held = device >= 0 if whole else device
    if not whole or (device >= len(arrays["names"])).any() or not np.isin(role[held], range(len(ROLES))).all():
        raise InputError(f"{path}: this split was changed by hand and does not fit; make it again")
    source = source._replace(x=source.x if held.all() else source.x[held], names=tuple(map(str, arrays["names"])))
    return with_roles(source, source.y[held], device[held], role[held].astype(np.int8), normalise=normalise)
