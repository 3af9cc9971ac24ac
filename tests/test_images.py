"""A folder of images: device/label/*.png with device/unlabelled/."""

import json

import numpy as np
import pytest
from PIL import Image, ImageOps

from fedcpsl.cli import run_command
from fedcpsl.config import Data
from fedcpsl.data.readers import read_images
from fedcpsl.data.sources import load_federation
from fedcpsl.data.split import UNLABELLED
from fedcpsl.deployment.device_process import DeviceConfig, make_participant
from fedcpsl.deployment.job import read_job
from fedcpsl.errors import InputError

from .command import fedcpsl


def picture(path, value, mode="L", size=(20, 18)):
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 255 - value, 7)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    top = tmp_path / "photos"
    for device in ("ann", "bob"):
        for i in range(6):
            picture(top / device / "day" / f"{i}.png", 200 + i)
            picture(top / device / "night" / f"{i}.png", 10 + i)
        picture(top / device / "unlabelled" / "x.png", 100)
    return top


def load(folder):
    return load_federation(Data(file=str(folder)), seed=0)


def test_grey_images(folder):
    federation = load(folder)
    assert federation.names == ("ann", "bob")
    assert federation.class_names == ("day", "night")
    assert federation.x.shape == (26, 1, 18, 20)
    assert federation.x.dtype == np.uint8
    assert sorted(federation.x[federation.y == 0][:6, 0, 0, 0].tolist()) == [200, 201, 202, 203, 204, 205]
    assert (federation.role[federation.y == -1] == UNLABELLED).all()
    assert (federation.y == -1).sum() == 2


def test_one_image_in_colour_makes_all_of_them_colour(folder):
    picture(folder / "bob" / "day" / "c.jpg", 30, "RGB")
    federation = load(folder)
    assert federation.x.shape == (27, 3, 18, 20)


def test_training_on_images_from_the_command_line(folder):
    done = fedcpsl("run", "--data", "photos", "--rounds", "2", "--out", "a", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    assert 'name = "cnn"' in (folder.parent / "a" / "config.toml").read_text()


def test_images_of_any_size_are_scaled_and_new_ones_alike(folder):
    picture(folder / "ann" / "day" / "wide.png", 250, size=(60, 20))
    done = fedcpsl("run", "--data", "photos", "--rounds", "2", "--out", "a", cwd=folder.parent)
    assert done.returncode == 2
    assert "wide.png: is 60 x 20 where" in done.stderr
    assert "or give --set data.image_size=64" in done.stderr
    with Image.open(folder / "bob" / "night" / "0.png") as image:
        image.resize((33, 70)).save(folder / "bob" / "night" / "0.png")
    federation = load_federation(Data(file=str(folder), image_size=16), seed=0)
    assert federation.x.shape == (27, 1, 16, 16)
    done = fedcpsl(
        "run",
        "--data",
        "photos",
        "--rounds",
        "2",
        "--set",
        "data.image_size=16",
        "--eta",
        "0.05",
        "--out",
        "a",
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    new = folder.parent / "new" / "me" / "day" / "1.png"
    picture(new, 230, size=(100, 31))
    done = fedcpsl("predict", "a", "new/me/day/1.png", "--device", "ann", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    for i in range(3):
        picture(new.with_name(f"{i}.png"), 220 + i, size=(90, 30 + i))
        picture(folder.parent / "new" / "me" / "night" / f"{i}.png", 20 + i, size=(31 + i, 41))
    done = fedcpsl("adapt", "a", "--data", "new", "--name", "me", "--rounds", "2", cwd=folder.parent)
    assert done.returncode == 0, done.stderr


def test_new_images_are_scaled_as_those_of_training_were(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    for path in folder.rglob("*.png"):
        Image.fromarray(np.random.default_rng(len(str(path))).integers(0, 256, (30, 50), np.uint8)).save(path)
    scaled = ["--set", "data.image_size=16", "--algorithm", "fedcpsl", "--rounds", "1"]
    assert run_command(["run", "--data", "photos", *scaled, "--out", "a"]) == 0
    one = folder / "ann" / "day" / "0.png"
    middle, stretched = ImageOps.fit(Image.open(one), (16, 16)), Image.open(one).resize((16, 16))
    np.savez("scaled.npz", x=np.stack([np.asarray(image)[None] for image in (middle, stretched)]))
    capsys.readouterr()
    found = []
    for new in (str(one), "scaled.npz"):
        assert run_command(["predict", "a", new, "--device", "ann"]) == 0
        found += [line.split(",")[-2:] for line in capsys.readouterr().out.splitlines()[1:]]  # the probabilities
    assert len(found) == 3
    assert found[0] == found[1] != found[2]


def test_a_size_may_be_swept_though_images_have_several(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    picture(folder / "ann" / "day" / "wide.png", 250, size=(60, 20))
    options = ["--data", "photos", "--algorithm", "fedavg", "--rounds", "1", "--grid", "data.image_size=8,16"]
    assert run_command(["sweep", *options, "--seeds", "1", "--out", "s"]) == 0
    manifests = [json.loads((run / "manifest.json").read_text()) for run in (folder.parent / "s" / "runs").iterdir()]
    assert len({manifest["split_sha256"] for manifest in manifests}) == 2


def test_only_the_images_of_a_folder_are_scaled(tmp_path):
    np.savez(tmp_path / "im.npz", x=np.zeros((9, 1, 20, 20)), y=np.arange(9) % 3)
    for data in (Data(file=str(tmp_path / "im.npz"), partition="iid", image_size=8), Data(image_size=8)):
        with pytest.raises(InputError, match=r"data\.image_size = 8: only the images of a folder are scaled"):
            load_federation(data, seed=0)


JOB = """
[data]
image_size = 16
[model]
name = "cnn"
[federation]
shape = [3, 16, 16]
classes = ["day", "night"]
"""


def test_a_real_device_scales_its_images_as_the_job_says(folder, tmp_path):
    """And takes grey ones for coloured where those of others are."""
    job = read_job(JOB, "job.toml")
    data = Data(dataset="own", file=str(folder), partition="iid", devices=1, labelled=1.0)
    participant = make_participant(DeviceConfig("ann", data, tmp_path / "state"), job, "r")
    assert participant.local_data.x_labelled.shape[1:] == (3, 16, 16)
    with pytest.raises(InputError, match=r"data.image_size = 8: an input has shape \[3, 16, 16\]; give \[3, 8, 8\]"):
        read_job(JOB.replace("image_size = 16", "image_size = 8"), "job.toml")


def test_a_device_may_have_unlabelled_images_alone_and_no_folder_of_its_name(folder, tmp_path):
    job = read_job(JOB, "job.toml")
    for name, expected in (("ann", 12), ("new", 0)):
        top = folder / name
        if name == "new":
            picture(top / "unlabelled" / "a.png", 20)
            picture(top / "Unlabelled" / "b.png", 30)
        data = Data(dataset="own", file=str(top), partition="iid", devices=1, labelled=1.0)
        local_data = make_participant(DeviceConfig(name, data, tmp_path / f"state-{name}"), job, "r").local_data
        assert len(local_data.x_labelled) + len(local_data.x_test) == expected
        assert len(local_data.x_unlabelled) == (1 if expected else 2)


def test_photographs_are_upright_and_what_is_transparent_is_white(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side: turn by a quarter to the right
    Image.fromarray(np.rot90(pixels).copy()).save(tmp_path / "b.png", exif=exif)
    images = read_images([tmp_path / "a.png", tmp_path / "b.png"])
    assert (images[0] == images[1]).all()
    seen = np.dstack([pixels, np.full((8, 12), 255, np.uint8)])
    seen[:4, :, 3] = 0
    Image.fromarray(seen).save(tmp_path / "c.png")
    image = read_images([tmp_path / "c.png"])[0].transpose(1, 2, 0)
    assert (image[:4] == 255).all()
    assert (image[4:] == pixels[4:]).all()


def test_the_middle_of_an_image_is_kept(tmp_path):
    pixels = np.zeros((4, 12), np.uint8)
    pixels[:, 4:8] = 200
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert read_images([tmp_path / "a.png"], (2, 2)).min() > 180  # 67 if it were all of the image


def test_large_images_are_noted(folder, caplog):
    for path in folder.rglob("*.png"):
        picture(path, 9, size=(120, 100))
    with caplog.at_level("WARNING", "fedcpsl"):
        load(folder)
    assert "photos: images of 120 x 100 pixels take much time and memory; --set data.image_size=64" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "fedcpsl"):
        load_federation(Data(file=str(folder), image_size=100), seed=0)
    assert "much time and memory" not in caplog.text


def broken_image(folder):
    (folder / "ann" / "day" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing more")


def truncated_image(folder):
    path = folder / "ann" / "day" / "0.png"
    path.write_bytes(path.read_bytes()[:45])


def only_unlabelled(folder):
    for path in [p for p in folder.rglob("*.png") if p.parent.name != "unlabelled"]:
        path.unlink()


def empty(folder):
    for path in folder.rglob("*.png"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (broken_image, "0.png: not a readable image"),
        (truncated_image, "0.png: not a readable image"),
        (lambda f: picture(f / "ann" / "day" / "big.png", 3, size=(40, 18)), "big.png: is 40 x 18 where"),
        (lambda f: (f / "ann" / "day" / "notes.txt").write_text("hello"), "notes.txt: not an image"),
        (lambda f: picture(f / "ann" / "loose.png", 3), "loose.png: images belong into"),
        (only_unlabelled, "no image has a label"),
        (empty, "has no images"),
    ],
)
def test_a_bad_folder_is_named(folder, spoil, words):
    spoil(folder)
    with pytest.raises(InputError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
