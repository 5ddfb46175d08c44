"""Fashion-MNIST: files in their true format, plain or packed, checked, split without leaks."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmuon_pl.cli import main
from fedmuon_pl.data import fashion
from fedmuon_pl.data.arrays import stratified
from fedmuon_pl.data.fashion import DEBIAN, FashionMNIST, read_fashion_mnist
from fedmuon_pl.data.files import parse_idx
from fedmuon_pl.data.partition import IID
from fedmuon_pl.errors import ConfigError

FILES = {
    "train-images-idx3-ubyte": (60, 28, 28),
    "train-labels-idx1-ubyte": (60,),
    "t10k-images-idx3-ubyte": (20, 28, 28),
    "t10k-labels-idx1-ubyte": (20,),
}


def idx(array):
    """Bytes of an IDX file, from the format's description: big-endian lengths, unsigned bytes."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write(folder, packed):
    """Small files of random images; six, or two, of each class."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    arrays, known = {}, {}
    for name, shape in FILES.items():
        images = len(shape) == 3
        arrays[name] = rng.integers(0, 256, shape) if images else np.arange(shape[0]) % 10
        content = idx(arrays[name])
        known[name] = hashlib.sha256(content).hexdigest()
        path = folder / (name + ".gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    return arrays, known


@pytest.fixture
def nowhere(monkeypatch):
    """No package of the machine is looked at."""
    monkeypatch.setattr(fashion, "DEBIAN", Path("/nowhere"))
    monkeypatch.setattr(fashion.read_fashion_mnist, "__defaults__", (fashion._KNOWN, Path("/no")))


def module(root, **kwargs):
    made = FashionMNIST(root=str(root), clients=4, partition=IID(), **kwargs)
    made.setup()
    return made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["FashionMNIST/raw", "."])
def test_both_layouts(tmp_path, monkeypatch, nowhere, packed, below):
    folder = tmp_path / "given" / below
    arrays, known = write(folder, packed)
    for name, digest in known.items():
        monkeypatch.setitem(fashion._KNOWN, name, digest)
    train, test = read_fashion_mnist(tmp_path / "given")
    assert (train.inputs.dtype, train.inputs.shape) == (np.uint8, (60, 1, 28, 28))
    np.testing.assert_array_equal(train.inputs[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(train.labels, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(test.inputs[:, 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(test.labels, arrays["t10k-labels-idx1-ubyte"])


def test_what_is_held_out_and_normalised(tmp_path, monkeypatch, nowhere):
    arrays, known = write(tmp_path / "d", True)
    for name, digest in known.items():
        monkeypatch.setitem(fashion._KNOWN, name, digest)
    data = module(tmp_path / "d", train_size=20, val_size=10)
    images = arrays["train-images-idx3-ubyte"]

    def where(inputs):
        raw = inputs.double()[:, 0] * 0.3530 * 255 + 0.2860 * 255
        found = (raw[:, None] - torch.from_numpy(images)).abs().amax((2, 3)) < 1e-3
        assert found.sum(1).eq(1).all()
        return found.int().argmax(1)

    splits = data.splits
    assert splits.train[0].dtype == torch.uint8
    # torch reads a memory format, and so a convolution's last bits, out of the strides.
    assert data.gather(torch.arange(20))[0].stride() == (784, 784, 28, 1)
    train, val = (where(data.prepare(part)[0]) for part in (splits.train, splits.val))
    assert not set(train.tolist()) & set(val.tolist())
    labels = torch.from_numpy(arrays["train-labels-idx1-ubyte"])
    assert torch.equal(splits.train[1], labels[train])
    assert np.bincount(splits.labels).tolist() == [2] * 10
    assert splits.val[1].bincount().tolist() == [1] * 10
    assert splits.test[0].shape == (20, 1, 28, 28)
    assert sorted(data.partition.indices.tolist()) == list(range(20))
    # The validation part is the data set's; the clients hold the rest unless told otherwise.
    rest = module(tmp_path / "d", val_size=10)
    assert torch.equal(rest.splits.val[0], splits.val[0])
    assert len(rest.splits.train[0]) == 50
    assert rest.describe() != data.describe()
    with pytest.raises(ConfigError, match=r"data.train_size=51 and data.val_size=10: parts of"):
        module(tmp_path / "d", train_size=51, val_size=10)
    with pytest.raises(ConfigError, match=r"data.val_size=0: parts of \[0, 60\] of 60 samples"):
        module(tmp_path / "d", val_size=0)


def test_missing_and_wrong_files_get_one_sentence(tmp_path, monkeypatch, nowhere, capsys):
    flags = ["-c", "base", "-c", "experiment/fashion5k", "--data.root", str(tmp_path / "d")]
    assert main(["partition", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedmuon: data.root={tmp_path / 'd'}: Fashion-MNIST is not there: put")
    for part in ("FashionMNIST/raw", "t10k-labels-idx1-ubyte.gz", "dataset-fashion-mnist"):
        assert part in said
    _, known = write(tmp_path / "d", True)
    with pytest.raises(ConfigError, match=r"train-images.*\.gz is not the known file \(SHA-256"):
        read_fashion_mnist(tmp_path / "d")
    path = tmp_path / "d" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
        read_fashion_mnist(tmp_path / "d", known)
    path.unlink()
    with pytest.raises(ConfigError, match="is not there"):
        read_fashion_mnist(tmp_path / "d", known)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_debian_package(tmp_path):
    train, test = read_fashion_mnist(tmp_path)
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert abs(train.inputs.mean() / 255 - 0.2860) < 5e-5
    assert abs((train.inputs / 255).std() - 0.3530) < 5e-5


@pytest.mark.parametrize(
    ("code", "dtype"), [(0x08, ">u1"), (0x09, ">i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0E, ">f8")]
)
def test_idx_types(code, dtype):
    values = np.arange(-2 if code > 8 else 0, 10).astype(dtype).reshape(-1, 2)
    head = bytes([0, 0, code, 2, 0, 0, 0, len(values), 0, 0, 0, 2])
    read = parse_idx(head + values.tobytes())
    np.testing.assert_array_equal(read, values)
    assert read.flags.writeable
    assert read.dtype.isnative
    for broken in (head + values.tobytes()[:-1], head + values.tobytes() + b"x", head[:5], b""):
        with pytest.raises(ConfigError, match="no whole IDX file"):
            parse_idx(broken)
    with pytest.raises(ConfigError, match="no whole IDX file"):
        parse_idx(b"\0\1" + head[2:] + values.tobytes())
    with pytest.raises(ConfigError, match="no whole IDX file"):
        parse_idx(b"\0\0\x07" + head[3:] + values.tobytes())


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(-1, 6), min_size=20, max_size=150).map(np.array),
    seed=st.integers(0, 2**40),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_stratified_parts(labels, seed, sizes):
    parts = stratified(labels, seed, sizes)
    assert [p.size for p in parts] == sizes
    together = np.concatenate(parts)
    assert np.unique(together).size == together.size
    for k in set(labels.tolist()):
        share = sizes[0] * np.mean(labels == k)
        assert abs(np.sum(labels[parts[0]] == k) - share) < 1
    np.testing.assert_array_equal(stratified(labels, seed, sizes[:1])[0], parts[0])


def test_stratified_is_exact_where_it_can_be_and_random_within_a_class():
    labels = np.repeat(np.arange(10), 6000)
    val, train = stratified(labels, 0, [5000, 5000])
    assert np.bincount(labels[val]).tolist() == np.bincount(labels[train]).tolist() == [500] * 10
    mean = np.mean(train % 6000)
    assert abs(mean - 3000) < 4 * (6000 / 12**0.5) / 5000**0.5
    assert not np.array_equal(stratified(labels, 1, [5000])[0], val)
