"""Where a report may be written: a new file, or one of ours."""

from pathlib import Path

from fedcpsl.errors import InputError

GENERATOR = '<meta name="generator" content="fedcpsl'
CAPTIONS = (
    "How the runs ended: accuracy on the devices’ own tests",
    "What it took to get to an accuracy: the mean over",
    "Accuracy per device, best first: ",
    "Every evaluated round; accuracies in %",
    r"Every evaluated round; accuracies in \%",
)
EMPTY = ("No run got to 50 %.", "No device has a test set: ")
HEADS = (
    "name,seeds,rounds,personal",
    "name,accuracy,rounds,uplink_bytes,seconds",
    "name,seed,round,personal,global,",
    "device,labelled,unlabelled,active_rounds",
)
OPENINGS = {  # how the files of a format begin
    "md": (*CAPTIONS, *EMPTY),
    "latex": (
        *(f"\\begin{{table}}\n  \\centering\n  \\caption{{{caption}" for caption in CAPTIONS),
        *(f"% {words}" for words in EMPTY),
    ),
    "csv": HEADS,
}


def check_target(out: Path, form: str) -> None:
    """Refuse before any work what could not be written, or would replace a file that is no report of ours."""
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give --out a file, for example {out / 'report.html'}")
    if out.exists() and not (out.is_file() and _is_ours(out, form)):
        raise InputError(f"{out}: exists and is no report; give another --out")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder; make it, or give another --out")


def _is_ours(path: Path, form: str) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(2000)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give another --out") from error
    return GENERATOR in beginning if form == "html" else beginning.startswith(OPENINGS[form])
