"""fedcpsl data: how samples are split among devices."""

import argparse
from pathlib import Path
from typing import Any

from fedcpsl.cli.options import add_settings, config_of
from fedcpsl.errors import InputError


def add_data(commands: Any) -> None:
    data = commands.add_parser(
        "data",
        help="show which samples each device holds, and save a split",
        description="Show a split as a table and a picture, and save it to use again with --set data.split=FILE.",
        allow_abbrev=False,
    )
    add_settings(data)
    data.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw it: devices by classes, as SVG")
    data.add_argument("--save", type=Path, metavar="FILE.npz", help="save the split")
    data.set_defaults(command=_data)


def _data(parsed: argparse.Namespace) -> int:
    config = config_of(parsed)
    for path, suffix in ((parsed.picture, ".svg"), (parsed.save, ".npz")):
        if path and path.suffix != suffix:
            raise InputError(f"{path}: give a name that ends with {suffix}")
        if path and path.exists():
            raise InputError(f"{path}: exists already; give another name")
        if path and not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder; make it, or give another name")
    from rich.console import Console

    from fedcpsl.data.sources import assign_devices, load_federation, load_source, resolve_auto, split_bytes
    from fedcpsl.report.terminal import class_map, print_table, shown_devices, split_table
    from fedcpsl.settings import PUBLISHED_TESTS
    from fedcpsl.storage import write_whole

    resolved, seed = resolve_auto(config.data), config.run.seed
    if resolved.dataset == "synthetic" and parsed.save:
        raise InputError("--save: synthetic samples follow from --seed and --devices; there is no split to save")
    source = None if resolved.dataset == "synthetic" else load_source(resolved)
    console = Console()
    whole = load_federation(resolved, seed, source)
    federation = shown_devices(whole, console)
    print_table(split_table(federation), console)
    print_table(class_map(federation), console)
    print(f"inputs of shape {list(whole.shape)}{_channels(whole.shape)}")
    print(f"split sha256 {whole.digest}")
    if parsed.save and source:
        if resolved.split:
            raise InputError("--save: this split is saved already, in the file of data.split")
        write_whole(parsed.save, split_bytes(assign_devices(source, resolved, seed), federation))
        tests = f" --set data.test={PUBLISHED_TESTS}" if resolved.test == PUBLISHED_TESTS else ""
        print(f"saved    {parsed.save}; use it again with --set data.split={parsed.save}{tests}")
    if parsed.picture:
        from fedcpsl.report.figures import split_picture

        write_whole(parsed.picture, split_picture(federation))
        print(f"picture  {parsed.picture.resolve().as_uri()}")
    return 0


def _channels(shape: tuple[int, ...]) -> str:
    """Describe the axes of an input as models interpret them."""
    channels = f"{shape[0]} channel{'s' * (shape[0] > 1)}"
    if len(shape) == 2:
        return f": {channels} of {shape[1]} times"
    if len(shape) == 3:  # width before height, as everywhere
        return f": {channels} of {shape[2]} x {shape[1]} pixels"
    return ""
