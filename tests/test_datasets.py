"""Data sets that users bring: read from files in their true format, which the tests write."""

import gzip
import hashlib
import pickle

import numpy as np
import pytest
import torch
import torchvision
from cli_runs import OWN_IMAGES
from PIL import Image
from scipy.io import savemat
from test_fashion import idx

from fedmuon_pl import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    IID,
    SVHN,
    FashionMNIST,
    ImageFolder,
    Natural,
    Npz,
    TinyImageNet,
)
from fedmuon_pl.cli import main
from fedmuon_pl.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Never the user's own."""
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(kind, partition=None, clients=3, val_size=10, **kwargs):
    made = kind(clients=clients, partition=partition or IID(), val_size=val_size, **kwargs)
    made.setup()
    return made


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


# -- CIFAR ----------------------------------------------------------------------------------------


def write_cifar(folder, kind, monkeypatch):
    """Python batches: each image a row, red, green and blue plane after plane, row by row."""
    folder = folder / kind.base_folder
    folder.mkdir(parents=True)
    fine = "fine_labels" if kind is torchvision.datasets.CIFAR100 else "labels"
    classes = 100 if fine == "fine_labels" else 10
    written = {}

    def dump(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    for part in ("train_list", "test_list"):
        entries = []
        for i, (name, _) in enumerate(getattr(kind, part)):
            x, y = images(20, 3, 32, 32, seed=i), [(7 * i + j) % classes for j in range(20)]
            written.setdefault(part, []).append((x, y))
            entries.append(dump(name, {"data": x.reshape(20, 3072), fine: y}))
        monkeypatch.setattr(kind, part, entries)
    name, md5 = dump(kind.meta["filename"], {kind.meta["key"]: [f"c{i}" for i in range(classes)]})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5})
    return {
        part: (np.concatenate([x for x, _ in found]), [label for _, y in found for label in y])
        for part, found in written.items()
    }


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100])
def test_cifar(tmp_path, monkeypatch, kind):
    written = write_cifar(tmp_path, getattr(torchvision.datasets, kind.__name__), monkeypatch)
    train, test = kind(clients=2, partition=IID(), root=str(tmp_path)).read()
    for part, name in ((train, "train_list"), (test, "test_list")):
        np.testing.assert_array_equal(part.inputs, written[name][0])
        assert part.labels.tolist() == written[name][1]
        assert part.num_classes == (10 if kind is CIFAR10 else 100)
    data = build(kind, root=str(tmp_path), val_size=10)
    # Normalised by channel, from bytes, when a batch is taken.
    x, _ = next(iter(data.test_dataloader()))
    assert data.splits.test[0].dtype == torch.uint8
    mean, std = (np.array(v)[:, None, None] for v in (kind.mean, kind.std))
    np.testing.assert_allclose(x, (test.inputs / 255 - mean) / std, atol=1e-5)
    data.place(torch.device("cpu"), torch.float64)
    x, _ = next(iter(data.test_dataloader()))
    assert x.dtype == torch.float64
    np.testing.assert_allclose(x, (test.inputs / 255 - mean) / std, atol=1e-13)


def test_a_damaged_file_is_noticed(tmp_path, monkeypatch):
    write_cifar(tmp_path, torchvision.datasets.CIFAR10, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="CIFAR10 is not there, or damaged: unpack"):
        build(CIFAR10, root=str(tmp_path))


# -- SVHN -----------------------------------------------------------------------------------------


def test_svhn(tmp_path, monkeypatch):
    parts = {}
    for i, (split, n) in enumerate((("train", 40), ("test", 20))):
        x, y = images(n, 3, 32, 32, seed=i), np.arange(n) % 10
        parts[split] = (x, y)
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": x.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10, y)[:, None]})
        entry = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
        monkeypatch.setitem(torchvision.datasets.SVHN.split_list, split, entry)
    train, test = SVHN(clients=2, partition=IID(), root=str(tmp_path)).read()
    for part, split in ((train, "train"), (test, "test")):
        np.testing.assert_array_equal(part.inputs, parts[split][0])
        np.testing.assert_array_equal(part.labels, parts[split][1])


# -- EMNIST ---------------------------------------------------------------------------------------


def columnwise(upright):
    """As the files hold an image: column after column."""
    return upright.transpose(0, 2, 1)


@pytest.mark.parametrize(("split", "first"), [("letters", 1), ("digits", 0)])
def test_emnist_idx(tmp_path, split, first):
    folder = tmp_path / "EMNIST" / "raw"
    folder.mkdir(parents=True)
    written = {}
    for i, part in enumerate(("train", "test")):
        x, y = images(40, 28, 28, seed=i), np.arange(40) % 10
        written[part] = x, y
        for kind, array in (("images-idx3", columnwise(x)), ("labels-idx1", y + first)):
            path = folder / f"emnist-{split}-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx(array)))
    read = EMNIST(split, clients=2, partition=IID(), root=str(tmp_path)).read()
    for part, name in zip(read, ("train", "test"), strict=True):
        np.testing.assert_array_equal(part.inputs[:, 0], written[name][0])
        np.testing.assert_array_equal(part.labels, written[name][1])
        assert part.num_classes == {"letters": 26, "digits": 10}[split]


def test_emnist_by_writer(tmp_path):
    folder = tmp_path / "EMNIST" / "matlab"
    folder.mkdir(parents=True)
    x, y, who = images(60, 28, 28), np.arange(60) % 10, np.array([7, 3, 12])[np.arange(60) % 3]
    rows = columnwise(x).reshape(60, 784)
    train = {"images": rows, "labels": y[:, None], "writers": who[:, None]}
    test = {"images": rows[:20], "labels": y[:20, None], "writers": who[:20, None]}
    savemat(folder / "emnist-digits.mat", {"dataset": {"train": train, "test": test}})
    data = build(EMNIST, Natural(), split="digits", root=str(tmp_path), writers=True)
    train_x = data.splits.train[0][:, 0].numpy()
    origin = [int(np.flatnonzero((x == one).all((1, 2)))[0]) for one in train_x]
    assert [sorted({who[origin[s]] for s in data.partition[c]}) for c in range(3)] == [
        [3],
        [7],
        [12],
    ]
    assert sorted(data.partition.indices.tolist()) == list(range(50))
    with pytest.raises(ConfigError, match=r"data.partition: clients=4, but the data have 3 wri"):
        build(EMNIST, Natural(), 4, split="digits", root=str(tmp_path), writers=True)
    savemat(folder / "emnist-digits.mat", {"dataset": {"train": 1}})
    with pytest.raises(ConfigError, match="is no EMNIST file"):
        build(EMNIST, split="digits", root=str(tmp_path), writers=True)


# -- folders --------------------------------------------------------------------------------------


def test_tiny_imagenet(tmp_path, cache):
    root = tmp_path / "tiny-imagenet-200"
    names = ["n02", "n01"]
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(names) + "\n")
    lines = []
    for i, name in enumerate(names):
        (root / "train" / name / "images").mkdir(parents=True)
        for j in range(6):
            colour = (200 * i, 20 * j, 90)  # one colour: JPEG keeps it to a unit or two
            one = Image.new("RGB", (64, 64), colour)
            one.save(root / "train" / name / "images" / f"{name}_{j}.JPEG", quality=95)
            one.save(root / "val" / "images" / f"val_{len(lines)}.JPEG", quality=95)
            lines.append(f"val_{len(lines)}.JPEG\t{name}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    for _ in range(2):  # decoded, and from the cache
        train, test = TinyImageNet(clients=2, partition=IID(), root=str(tmp_path)).read()
        assert train.inputs.shape == test.inputs.shape == (12, 3, 64, 64)
        assert train.labels.tolist() == [0] * 6 + [1] * 6  # classes by name, n01 first
        assert test.labels.tolist() == [1] * 6 + [0] * 6
        reds = train.inputs[:, 0].reshape(12, -1).mean(1)
        assert np.abs(reds - np.repeat([200, 0], 6)).max() < 3
        greens = train.inputs[:6, 1].reshape(6, -1).mean(1)
        assert np.abs(greens - 20 * np.arange(6)).max() < 3
    assert len(list(cache.iterdir())) == 2
    (root / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(ConfigError, match=r"val_3\.JPEG is not there: unpack"):
        TinyImageNet(clients=2, partition=IID(), root=str(root)).read()


@pytest.mark.parametrize("grey", [False, True])
def test_image_folder(tmp_path, grey):
    ramp = np.tile(np.arange(40, dtype=np.uint8), (20, 1))  # 20 high, 40 wide
    for part, count in (("train", 8), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(ramp + i).save(tmp_path / part / name / f"{i}.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    made = ImageFolder(str(tmp_path), 20, grey, clients=2, partition=IID())
    train, test = made.read()
    assert train.labels.tolist() == [0] * 8 + [1] * 8
    assert test.labels.tolist() == [0] * 3 + [1] * 3
    assert train.inputs.shape == (16, 1 if grey else 3, 20, 20)
    for c in range(train.inputs.shape[1]):  # the middle of the ramp
        np.testing.assert_array_equal(train.inputs[2, c], ramp[:, 10:30] + 2)
    small = ImageFolder(str(tmp_path), 10, grey, clients=2, partition=IID()).read()[0]
    assert small.inputs.shape[2:] == (10, 10)
    # A file that changed is not taken from the cache.
    Image.fromarray(ramp + 99).resize((40, 20)).save(tmp_path / "train" / "cat" / "2.png", "BMP")
    np.testing.assert_array_equal(made.read()[0].inputs[2, 0], ramp[:, 10:30] + 99)
    (tmp_path / "test" / "bird").mkdir()
    with pytest.raises(ConfigError, match="bird: no such class in"):
        made.read()
    (tmp_path / "train" / "cat" / "2.png").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"2\.png is no readable image"):
        made.read()


def test_images_of_16_bits_keep_their_shades(tmp_path):
    ramp = np.tile(np.arange(20, dtype=np.uint16) * 3000, (20, 1))
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(ramp).save(tmp_path / part / name / "0.png")
    train, _ = ImageFolder(str(tmp_path), 20, True, clients=2, partition=IID()).read()
    np.testing.assert_array_equal(train.inputs[0, 0], ramp // 257)
    wide = Image.fromarray(ramp.astype(np.int32))
    wide.save(tmp_path / "train" / "cat" / "0.tif")
    with pytest.raises(ConfigError, match=r"0\.tif has pixels of 32 bits"):
        ImageFolder(str(tmp_path), 20, clients=2, partition=IID()).read()


# -- arrays ---------------------------------------------------------------------------------------


def write_npz(path, n=60, shape=(3, 12, 12), **more):
    tables = {
        "x_train": images(n, *shape),
        "y_train": np.arange(n, dtype=np.int32) % 5,
        "x_test": images(20, *shape, seed=1),
        "y_test": np.arange(20) % 5,
        **more,
    }
    np.savez(path, **{k: v for k, v in tables.items() if v is not None})
    return tables


def test_npz(tmp_path):
    path = tmp_path / "mine.npz"
    tables = write_npz(path, writer=np.arange(60) % 4)
    data = build(Npz, Natural(), 4, path=str(path))
    assert data.splits.num_classes == 5
    x, _ = data.gather(torch.arange(50))
    # Measured, by channel, over the whole training part.
    raw = tables["x_train"] / 255
    mean, std = raw.mean((0, 2, 3)), raw.std((0, 2, 3))
    back = x.double() * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    np.testing.assert_allclose(back * 255, data.splits.train[0], atol=1e-3)
    assert data.gather(torch.zeros(2, 5, dtype=torch.long))[0].shape == (2, 5, 3, 12, 12)
    write_npz(path, writer=None)
    with pytest.raises(ConfigError, match="Natural needs to know writers, and Npz has none"):
        build(Npz, Natural(), path=str(path))


def test_npz_shapes(tmp_path):
    path = str(tmp_path / "mine.npz")
    last = write_npz(path, shape=(12, 10, 3))["x_train"]
    train, _ = Npz(path, channels_last=True, clients=2, partition=IID()).read()
    np.testing.assert_array_equal(train.inputs, last.transpose(0, 3, 1, 2))
    write_npz(path, shape=(12, 10))
    assert Npz(path, clients=2, partition=IID()).read()[0].inputs.shape == (60, 1, 12, 10)
    floats = np.random.default_rng(0).normal(size=(60, 7))
    write_npz(path, shape=(7,), x_train=floats, x_test=floats[:20])
    data = build(Npz, path=path, val_size=0.5)
    assert len(data.splits.val[0]) == len(data.splits.train[0]) == 30
    x = data.gather(torch.arange(30))[0]
    assert x.shape == (30, 1, 1, 7)
    flat = x.flatten(1)
    near = (flat[:, None].double() - torch.from_numpy(floats)).abs().amax(2).amin(1)
    assert near.max() < 1e-6  # as they are


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"y_test": None}, "has no array y_test"),
        ({"y_train": np.arange(59)}, r"cannot be used: labels must be int64 of shape \(60,\)"),
        ({"y_train": np.arange(60) / 2}, r"cannot be used: y_train must be integers"),
        ({"y_train": -np.arange(60)}, r"cannot be used: num_classes="),
        ({"writer": np.arange(3)}, r"cannot be used: writers must be int64 of shape \(60,\)"),
        ({"x_test": np.array([{}], dtype=object)}, "cannot be used: .*allow_pickle"),
        # Bytes are normalised and floats are not: the two parts would have other scales.
        ({"x_test": np.zeros((20, 3, 12, 12))}, r"x_train is uint8 .* and x_test float32 .* alike"),
        (
            {"x_test": np.zeros((20, 3, 9, 9), np.uint8)},
            r"and x_test uint8 \(3, 9, 9\); they should",
        ),
        (
            {"x_train": np.zeros((60, 3, 12, 12), np.int64)},
            "x_train must be uint8 or floats, got int",
        ),
    ],
)
def test_npz_refuses(tmp_path, more, message):
    write_npz(tmp_path / "mine.npz", **more)
    with pytest.raises(ConfigError, match=message):
        build(Npz, path=str(tmp_path / "mine.npz"))


# -- what all share -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kwargs", "parts"),
    [
        (CIFAR10, {}, ["unpack cifar-10-python.tar.gz", "cifar-10-batches-py", "data.download"]),
        (CIFAR100, {}, ["unpack cifar-100-python.tar.gz", "cifar-100-python"]),
        (SVHN, {}, ["train_32x32.mat and test_32x32.mat into"]),
        (EMNIST, {"split": "letters"}, ["emnist-letters-train-images-idx3-ubyte.gz"]),
        (EMNIST, {"split": "byclass", "writers": True}, ["emnist-byclass.mat", "matlab.zip"]),
        (TinyImageNet, {}, ["unpack tiny-imagenet-200.zip", "wnids.txt"]),
        (ImageFolder, {"image_size": 8}, ["train/CLASS/", "test/CLASS/"]),
    ],
)
def test_a_missing_file_gets_one_sentence(tmp_path, kind, kwargs, parts):
    with pytest.raises(ConfigError) as e:
        build(kind, root=str(tmp_path), **kwargs)
    said = str(e.value)
    assert said.startswith(f"data.root={tmp_path}: ")
    assert "\n" not in said
    assert not any(tmp_path.rglob("*.gz"))
    for part in parts:
        assert part in said
    with pytest.raises(ConfigError, match=r"nothing\.npz is not there: make it with numpy\.savez"):
        build(Npz, path=str(tmp_path / "nothing.npz"))


def test_nothing_is_fetched_unasked():
    for kind in (CIFAR10, CIFAR100, EMNIST, FashionMNIST, SVHN):
        kwargs = {"split": "digits"} if kind is EMNIST else {}
        assert kind(clients=2, partition=IID(), **kwargs).download is False
    with pytest.raises(ConfigError, match=r"data\.split=digit: EMNIST has byclass, bymerge"):
        EMNIST("digit", clients=2, partition=IID())


def test_the_images_are_part_of_the_fingerprint(tmp_path):
    told = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.npz"
        write_npz(path, x_train=images(60, 3, 12, 12, seed=seed))
        told += [build(Npz, path=str(path)).describe(), build(Npz, path=str(path)).describe()]
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert {k for k in told[0] if told[0][k] != told[2][k]} == {"images"}


def test_a_run_on_your_own_arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path / "mine.npz", writer=np.arange(60) % 4)
    text = OWN_IMAGES.format(
        network="LeNet, init_args: {in_channels: 3, image_size: 12, num_classes: 5}",
        skew="Rotation, init_args: {angles: [0, 30]}",
        partition="Natural",
        rounds=1,
    )
    (tmp_path / "mine.yaml").write_text(text)
    flags = ["-c", "base", "-c", "mine.yaml", "-c", "algorithm/fedavg", "--threads", "1"]
    flags += ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    assert main(["fit", *flags]) == 0
    assert (tmp_path / "runs/mine/fedavg-s0/done").is_file()
    assert main(["test", *flags, "--ckpt_path", "last"]) == 0
