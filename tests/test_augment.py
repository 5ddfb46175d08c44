"""Augmentation and feature skew: against torchvision, planned, and only where they belong."""

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tv
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datasets import images, write_npz

from fedmuon_pl import IID, ChannelGain, CropFlip, DirichletReleasedCode, Npz, Rotation
from fedmuon_pl.errors import ConfigError
from fedmuon_pl.seeding import numpy_rng

# -- augmentation ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5),
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    padding=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 999),
    floats=st.booleans(),
)
def test_crop_and_flip_are_torchvisions(n, height, width, padding, flip, seed, floats):
    x = torch.from_numpy(images(n, 3, height, width, seed=seed))
    x = x.double() if floats else x
    augment = CropFlip(padding, flip)
    plan = augment.plan(np.random.default_rng(seed), n)
    assert plan.shape == (n, 3)
    out = augment(x, torch.from_numpy(plan))
    assert out.dtype == x.dtype
    for image, (top, left, flipped), got in zip(x, plan.tolist(), out, strict=True):
        expected = tv.crop(tv.pad(image, padding), top, left, height, width)
        assert torch.equal(got, tv.hflip(expected) if flipped else expected)


def test_the_plan_is_uniform():
    plan = CropFlip(4).plan(np.random.default_rng(0), 90_000)
    for column, values in ((0, 9), (1, 9), (2, 2)):
        counts = np.bincount(plan[:, column], minlength=values)
        assert counts.size == values
        expected = 90_000 / values
        assert np.abs(counts - expected).max() < 5 * expected**0.5
    assert abs(np.corrcoef(plan.T) - np.eye(3)).max() < 0.02
    assert CropFlip(4, flip=False).plan(np.random.default_rng(0), 50)[:, 2].sum() == 0
    with pytest.raises(ValueError, match="padding=-1: must not be negative"):
        CropFlip(-1)


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "mine.npz"
    write_npz(path)

    def build(partition=None, **kwargs):
        made = Npz(str(path), clients=4, partition=partition or IID(), val_size=10, **kwargs)
        made.setup()
        return made

    return build


def local_step(data, indices, clients, *, step, **at):
    """What clients get to see in one of four local steps."""
    batches = [[row.numpy()] * 4 for row in indices]
    return list(data.local_data(batches, clients, torch.device("cpu"), **at))[step]


def test_a_clients_images_depend_on_seed_round_client_and_step_alone(npz):
    data, plain = npz(augment=CropFlip(2)), npz()
    indices = torch.arange(12).view(3, 4)
    at = {"round": 5, "step": 2, "seed": 9}
    together = local_step(data, indices, [3, 0, 2], **at)
    for i, client in enumerate([3, 0, 2]):
        alone = local_step(data, indices[i : i + 1], [client], **at)
        assert torch.equal(alone[0][0], together[0][i])
        assert torch.equal(alone[1][0], together[1][i])
        # Each by its own plan, before normalisation.
        plan = data.augment.plan(numpy_rng(9, "augment", 5, client, 2), 4)
        raw = data.augment(data.splits.train[0][indices[i]], torch.from_numpy(plan))
        assert torch.equal(alone[0][0], plain.prepare((raw, None))[0])
    for change in ({"round": 6}, {"step": 3}, {"seed": 8}):
        other = local_step(data, indices, [3, 0, 2], **{**at, **change})
        assert not torch.equal(other[0], together[0])
    # Neither evaluation nor a plain look at the samples is augmented.
    assert torch.equal(data.gather(indices)[0], plain.gather(indices)[0])
    for one, two in zip(data.val_dataloader(), plain.val_dataloader(), strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a[0], b[0])
    assert data.describe()["augment"] == {"name": "CropFlip", "padding": 2, "flip": True}


# -- feature skew ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(12, 12), (9, 13)])
@pytest.mark.parametrize("angle", [0.0, 180.0, 90.0, -90.0, 450.0, 30.0, -12.5])
def test_rotation_is_torchvisions(size, angle):
    x = torch.from_numpy(images(3, 2, *size))
    how = torch.full((3, 1), angle, dtype=torch.float64)
    if angle % 180 == 90 and size[0] != size[1]:
        with pytest.raises(ValueError, match="images of 9 x 13 do not fit"):
            Rotation().change(x, how)
        return
    got = Rotation().change(x, how)
    bilinear = tv.InterpolationMode.BILINEAR
    expected = tv.rotate(x.double(), angle, interpolation=bilinear).round()
    assert got.dtype == torch.uint8
    assert (got.double() - expected).abs().max() <= 1  # halves round either way
    assert (got.double() - expected).abs().mean() < 0.01


def test_channel_gain():
    x = torch.from_numpy(images(4, 3, 5, 5))
    how = torch.tensor([[1.0, 0.5, 2.0]] * 4, dtype=torch.float64)
    expected = (x.double() * how[:, :, None, None]).round().clamp(0, 255)
    assert torch.equal(ChannelGain().change(x, how).double(), expected)
    drawn = ChannelGain(0.3).draw(4000, 3, np.random.default_rng(0))
    assert drawn.shape == (4000, 3)
    assert 0.7 <= drawn.min() < 0.701
    assert 1.299 < drawn.max() <= 1.3
    for wrong in (0, 1.1, -1):
        with pytest.raises(ValueError, match="strength="):
            ChannelGain(wrong)
    with pytest.raises(ValueError, match="angles is empty"):
        Rotation([])


@pytest.mark.parametrize("skew", [Rotation([0, 90, 180, 270]), ChannelGain(0.5)])
def test_all_images_of_a_client_change_alike(npz, skew):
    data, plain = npz(feature_skew=skew), npz()
    assert data.partition == plain.partition
    drawn = skew.draw(4, 3, numpy_rng(0, "feature skew"))
    assert len(np.unique(drawn, axis=0)) > 1
    for client in range(4):
        mine = torch.from_numpy(data.partition[client].astype(np.int64))
        how = torch.from_numpy(np.asarray(drawn[[client] * len(mine)], np.float64))
        expected = skew.change(plain.splits.train[0][mine], how)
        assert torch.equal(data.splits.train[0][mine], expected)
    # Evaluation images are seen by one of the clients each.
    options = torch.from_numpy(np.asarray(drawn, np.float64))
    for name in ("val", "test"):
        before, after = getattr(plain.splits, name), getattr(data.splits, name)
        assert torch.equal(before[1], after[1])
        ways = torch.stack(
            [skew.change(before[0], way.expand(len(before[0]), -1)) for way in options]
        )
        same = (ways == after[0]).all(4).all(3).all(2)
        assert same.any(0).all()
        assert same.any(1).all()
        # For its own measurement a client sees all of them in its way.
        chosen = torch.arange(len(before[0])) % 2 == 0
        for client in range(4):
            seen, labels = data.seen_by(client, name, chosen)
            assert torch.equal(seen, ways[client][chosen])
            assert torch.equal(labels, before[1][chosen])
            assert torch.equal(plain.seen_by(client, name, chosen)[0], before[0][chosen])
    again = npz(feature_skew=skew)
    again.setup()
    assert torch.equal(again.splits.test[0], data.splits.test[0])
    assert data.describe()["feature_skew"]["name"] == type(skew).__name__


def test_a_shared_sample_cannot_be_skewed(npz, tmp_path):
    with pytest.raises(ConfigError, match="gives no sample to two clients"):
        npz(DirichletReleasedCode(0.01), feature_skew=Rotation())
    floats = np.zeros((60, 3, 4, 4))
    write_npz(tmp_path / "mine.npz", shape=(3, 4, 4), x_train=floats, x_test=floats[:20])
    with pytest.raises(ConfigError, match="these are floats"):
        npz(feature_skew=Rotation())
    write_npz(tmp_path / "mine.npz", shape=(3, 4, 5))
    with pytest.raises(ConfigError, match=r"data\.feature_skew: angles holds"):
        npz(feature_skew=Rotation())
