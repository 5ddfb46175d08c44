"""Transformers, networks by name and LoRA: counts from the papers, forwards written out, files."""

import csv
import math
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
import yaml
from cli_runs import arguments, fit
from federation import federate
from safetensors.torch import save_file
from test_methods import DATA

from fedmuon_pl import FedMuon, LocalMuon
from fedmuon_pl.cli import main
from fedmuon_pl.clients import ClientStack, side_by_side_fault, trainable
from fedmuon_pl.errors import ConfigError
from fedmuon_pl.models import DeiTTiny6, LoRA, ResNet18, SwinTiny, Timm, Torchvision, ViT
from fedmuon_pl.optim.muon import Muon
from fedmuon_pl.optim.orthogonalize import Orthogonalizer
from fedmuon_pl.optim.routing import split_parameters

SMALL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
small_timm = partial(Timm, "vit_tiny_patch16_224", num_classes=5, options=SMALL)
small_vit = partial(
    ViT, image_size=4, patch_size=2, in_channels=1, num_classes=3, dim=8, depth=2, heads=2
)
small_swin = partial(SwinTiny, num_classes=5, dim=16, depths=(2, 2), heads=(2, 4))
small_torchvision = partial(Torchvision, "shufflenet_v2_x0_5")


def weights(network, axes=0):
    return sum(p.numel() for p in network.parameters() if p.ndim >= axes)


def loss(network, batch):
    return F.cross_entropy(network(batch[0]), batch[1])


# -- counts and forwards ----------------------------------------------------------------------


def test_deit_tiny_6_has_the_weights_of_the_released_one():
    network = DeiTTiny6()
    assert weights(network) == 2_710_948
    assert weights(network, axes=2) == 2_695_296
    assert network.net.pos_embed.shape == (1, 65, 192)
    assert DeiTTiny6(image_size=64, num_classes=200).net.pos_embed.shape == (1, 257, 192)


def vit_weights(side, patch, channels, classes, dim, depth, hidden):
    tokens = (side // patch) ** 2 + 1
    block = 4 * dim * dim + 4 * dim + 2 * dim * hidden + hidden + dim + 4 * dim
    return (
        (channels * patch**2 + 1) * dim  # patches
        + (1 + tokens) * dim  # class token, positions
        + depth * block
        + 2 * dim  # the last norm
        + (dim + 1) * classes
    )


def test_vit_has_the_weights_that_are_counted_by_hand():
    assert weights(ViT()) == vit_weights(32, 4, 3, 100, 192, 12, 768) == 5_380_132
    network = ViT(16, 8, 1, 7, dim=24, depth=3, heads=4, mlp_ratio=2)
    assert weights(network) == vit_weights(16, 8, 1, 7, 24, 3, 48)
    # DeiT-Ti, "5M" in table 1 of arXiv 2012.12877.
    assert weights(Timm("deit_tiny_patch16_224", 1000)) == vit_weights(
        224, 16, 3, 1000, 192, 12, 768
    )


def swin_weights(side, patch, window, classes, dim=96):
    total = (3 * patch**2 + 1) * dim + 2 * dim
    for stage, (depth, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
        d = dim * 2**stage
        w = min(window, side // patch // 2**stage)
        total += depth * (12 * d * d + 13 * d + (2 * w - 1) ** 2 * heads)
        if stage:
            total += 2 * 2 * d + 2 * d * d  # norm of 4 patches of d/2, their reduction to d
    return total + 2 * d + (d + 1) * classes


def test_swin_tiny_has_the_weights_that_are_counted_by_hand():
    assert weights(SwinTiny()) == swin_weights(32, 2, 4, 100) == 27_574_318
    assert weights(SwinTiny(64, 4)) == swin_weights(64, 4, 4, 100)
    big = Timm("swin_tiny_patch4_window7_224", 1000)
    stated = torchvision.models.Swin_T_Weights.IMAGENET1K_V1.meta["num_params"]
    assert weights(big) == swin_weights(224, 4, 7, 1000) == stated


def test_vit_forward_written_out():
    torch.manual_seed(0)
    network = ViT(6, 2, 2, 5, dim=12, depth=2, heads=3, mlp_ratio=2).double()
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(0.3 * torch.randn_like(p))
    s = {n.removeprefix("net."): p for n, p in network.named_parameters()}

    def normed(x, name):
        mean = x.mean(-1, keepdim=True)
        deviation = ((x - mean).square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (x - mean) / deviation * s[f"{name}.weight"] + s[f"{name}.bias"]

    def linear(x, name):
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    rows = [
        (x[:, :, i : i + 2, j : j + 2] * s["patch_embed.proj.weight"][:, None]).sum((2, 3, 4)).T
        for i in (0, 2, 4)
        for j in (0, 2, 4)
    ]
    t = torch.stack(rows, 1) + s["patch_embed.proj.bias"]
    t = torch.cat([s["cls_token"].expand(3, 1, 12), t], 1) + s["pos_embed"]
    for i in range(2):
        at = f"blocks.{i}"
        heads = linear(normed(t, f"{at}.norm1"), f"{at}.attn.qkv").view(3, 10, 3, 3, 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, tokens, 4)
        mixed = (q @ k.mT / math.sqrt(4)).softmax(-1) @ v
        t = t + linear(mixed.transpose(1, 2).reshape(3, 10, 12), f"{at}.attn.proj")
        hidden = linear(normed(t, f"{at}.norm2"), f"{at}.mlp.fc1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        t = t + linear(hidden, f"{at}.mlp.fc2")
    expected = linear(normed(t, "norm")[:, 0], "head")
    assert expected.shape == (3, 5)
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def test_deit_tiny_6_starts_as_the_released_one():
    torch.manual_seed(0)
    for name, p in DeiTTiny6().net.named_parameters():
        std = float(p.detach().std())
        if name == "cls_token":
            assert std < 1e-5
        elif name.startswith("patch_embed"):  # torch's own: uniform up to 1 / sqrt(48)
            assert std == pytest.approx(1 / math.sqrt(48 * 3), rel=0.1)
        elif p.ndim > 1:
            assert std == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.equal(p, torch.full_like(p, name.endswith("weight"))), name


# -- side by side, and Muon -----------------------------------------------------------------------


def fused_torchvision():
    """Attention that cannot do without the fused kernel."""
    network = torchvision.models.VisionTransformer(8, 4, 1, 2, 16, 8, num_classes=5)
    network.conv_proj = torch.nn.Conv2d(1, 16, 4, 4)
    torch.nn.init.normal_(network.heads.head.weight)  # zero as it is
    return network


SIDE_BY_SIDE = {
    "deit": (DeiTTiny6, 3, 32, 100),
    "swin": (small_swin, 3, 32, 5),
    "lora": (lambda: LoRA(small_timm(), rank=2), 1, 8, 5),
    "torchvision": (fused_torchvision, 1, 8, 5),
}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_gradients_side_by_side_are_those_one_by_one(name):
    make, channels, side, classes = SIDE_BY_SIDE[name]
    torch.manual_seed(1)
    network = make().double()
    batch = (
        torch.randn(2, 2, channels, side, side, dtype=torch.float64),
        torch.randint(0, classes, (2, 2)),
    )
    both = ClientStack(network, 2)
    both.load([p.detach() for p in trainable(network).values()], dict(network.named_buffers()))
    with torch.no_grad():  # different weights for the two
        for x in both.x:
            x[1] += 0.01 * torch.randn_like(x[1])
    both.losses(loss, batch).sum().backward()
    assert side_by_side_fault(network, loss, batch) is None
    for c in range(2):
        alone = ClientStack(network, 1)
        alone.load([x[c].detach() for x in both.x], dict(network.named_buffers()))
        alone.losses(loss, tuple(t[c : c + 1] for t in batch)).sum().backward()
        for mine, theirs in zip(both.gradients(), alone.gradients(), strict=True):
            torch.testing.assert_close(mine[c], theirs[0], rtol=0, atol=1e-9)


def test_nothing_is_random_unless_asked():
    for make, random in ((small_vit, False), (partial(small_vit, dropout=0.1), True)):
        network, x = make(), torch.randn(2, 1, 4, 4)
        assert torch.equal(network(x), network(x)) != random
    network, x = small_swin(drop_path=0.5), torch.randn(4, 3, 32, 32)
    assert not torch.equal(network(x), network(x))


def test_class_token_and_positions_are_matrices_for_muon_unless_named():
    shapes = {n: p.shape for n, p in DeiTTiny6().named_parameters()}
    matrices, rest = split_parameters(shapes)
    assert {"net.cls_token", "net.pos_embed", "net.head.weight"} <= set(matrices)
    assert all(len(shapes[n]) == 1 for n in rest)
    _, rest = split_parameters(shapes, ["cls_token", "pos_embed"])
    assert {"net.cls_token", "net.pos_embed"} <= set(rest)


@pytest.mark.parametrize("view", ["flatten", "last_two"])
@pytest.mark.parametrize("clients", [0, 3])
def test_positions_step_as_one_matrix_of_tokens_by_width(view, clients):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros((clients,) * bool(clients) + (1, 7, 4)))
    p.grad = torch.randn_like(p)
    exact = Orthogonalizer("svd")
    muon = Muon([p], 1.0, orthogonalizer=exact, matrix_view=view, client_axis=bool(clients))
    muon.param_groups[0]["scale"] = "none"
    muon.step()
    singular = torch.linalg.svdvals(p.detach())
    torch.testing.assert_close(singular, torch.ones_like(singular), rtol=0, atol=1e-5)
    assert singular.shape[-1] == 4


# -- LoRA -----------------------------------------------------------------------------------------


def test_lora_trains_factors_and_head_only_from_where_the_network_was():
    torch.manual_seed(0)
    base = small_timm()
    x = torch.randn(3, 1, 8, 8)
    before = base(x).detach()
    network = LoRA(base, rank=2)
    torch.testing.assert_close(network(x), before, rtol=0, atol=1e-6)
    expected = {"head.weight": (5, 16), "head.bias": (5,)}
    for i in range(2):
        for layer, out in (("qkv", 48), ("proj", 16)):
            at = f"blocks.{i}.attn.{layer}"
            expected |= {f"{at}.lora_A.default.weight": (2, 16)}
            expected |= {f"{at}.lora_B.default.weight": (out, 2)}
    shapes = {n: tuple(p.shape) for n, p in trainable(network).items()}
    assert shapes == {f"net.{n}": shape for n, shape in expected.items()}
    network(x).sum().backward()
    assert {n for n, p in network.named_parameters() if p.grad is not None} == set(shapes)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (3.0, 1.5)])
def test_lora_adds_the_scaled_product_of_its_factors(alpha, scale):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).double()
    W, b = layer[0].weight.detach().clone(), layer[0].bias.detach().clone()
    network = LoRA(layer, 2, alpha, target_modules=["0"], also_train=[])
    A, B = trainable(network).values()
    with torch.no_grad():
        B.copy_(torch.randn_like(B))
    x = torch.randn(6, 5, dtype=torch.float64)
    expected = layer[1](x @ (W + scale * B @ A).T + b)
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-12)


def test_muon_takes_each_factor_by_itself_and_frozen_weights_stay(tmp_path):
    def network():
        return LoRA(small_vit(), rank=2, target_modules=["attn.qkv"])

    method = LocalMuon(0.1, orthogonalizer="svd", weight_decay=0.0)
    more = {"network": network, "cohort": 1, "local_steps": 1}
    recorder, learner = federate(method, DATA, tmp_path / "a", rounds=1, **more)
    start = learner.task.build_network(learner.seed).double().state_dict()
    for name, p in recorder.x[-1].items():
        moved = p - start[name]
        if "lora_B" in name:  # (24, 2)
            singular = torch.linalg.svdvals(moved)
            torch.testing.assert_close(singular, torch.full_like(singular, 0.1), rtol=0, atol=1e-9)
        elif "lora_A" in name:  # B = 0 leaves A without a gradient
            assert float(moved.abs().max()) == 0
    recorder, _ = federate(
        FedMuon(0.1, weight_decay=0.1), DATA, tmp_path / "b", rounds=2, network=network
    )
    trained = {n for n, p in network().named_parameters() if p.requires_grad}
    moved = {n for n, p in recorder.x[-1].items() if not torch.equal(p, start[n])}
    assert moved == trained
    assert any("lora_A" in n for n in moved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: must be at least 1"),
        ({"alpha": 0.0}, r"alpha=0.0: must be positive"),
        ({"dropout": 1.0}, r"dropout=1.0: must be in \[0, 1\)"),
        ({"target_modules": ["query"]}, "no layer's name ends in 'query'; the last are .*head"),
        ({"also_train": ["classifier"]}, "'classifier' is found in no .*the last layer is head"),
    ],
)
def test_lora_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRA(small_timm, **settings)


# -- weights from files ---------------------------------------------------------------------------


def saved(network, path, form):
    state = {n: t.clone() for n, t in network.net.state_dict().items()}
    if form == "safetensors":
        save_file(state, path)
    elif form == "model":
        torch.save({"model": {f"module.{n}": t for n, t in state.items()}, "epoch": 3}, path)
    else:
        torch.save(state, path)
    return state


@pytest.mark.parametrize("form", ["safetensors", "model", "plain"])
@pytest.mark.parametrize("make", [small_timm, partial(small_torchvision, 5)])
def test_weights_of_a_file_are_loaded(make, form, tmp_path):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    state = saved(make(), path, form)
    key = "weights_file" if make is not small_timm else "pretrained_file"
    loaded = make(**{key: str(path)})
    assert state.keys() == loaded.net.state_dict().keys()
    assert all(torch.equal(t, state[n]) for n, t in loaded.net.state_dict().items())


@pytest.mark.parametrize(
    ("make", "key", "head"),
    [(small_timm, "pretrained_file", "head"), (small_torchvision, "weights_file", "fc")],
)
def test_a_head_of_another_number_of_classes_starts_at_random_and_says_so(
    make, key, head, tmp_path
):
    state = saved(make(num_classes=7), tmp_path / "w.pth", "plain")
    said = f"w.pth has a head of 7 classes, not 4: {head}.weight, {head}.bias were not loaded"
    with pytest.warns(UserWarning, match=said):
        loaded = make(num_classes=4, **{key: tmp_path / "w.pth"}).net.state_dict()
    for name, t in loaded.items():
        assert torch.equal(t, state[name]) if head not in name else t.shape[0] == 4
    for name in (f"{head}.weight", f"{head}.bias"):
        del state[name]
    torch.save(state, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="w.pth has a head of no classes, not 4"):
        make(num_classes=4, **{key: tmp_path / "w.pth"})


def test_positions_are_fitted_to_another_image_size(tmp_path):
    state = saved(small_timm(), tmp_path / "w.pth", "plain")
    loaded = Timm(
        "vit_tiny_patch16_224", 5, tmp_path / "w.pth", options={**SMALL, "img_size": 16}
    ).net.state_dict()
    assert loaded["pos_embed"].shape == (1, 65, 16)
    assert all(torch.equal(t, state[n]) for n, t in loaded.items() if n != "pos_embed")
    assert torch.equal(loaded["pos_embed"][:, 0], state["pos_embed"][:, 0])


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "w.pth"
    state = saved(small_timm(), path, "plain")

    def refused(message, **options):
        # One sentence, and the root of the error, since that is what the command line shows.
        with pytest.raises(ConfigError, match=message) as error:
            Timm("vit_tiny_patch16_224", 5, path, options={**SMALL, **options})
        assert error.value.__cause__ is error.value.__context__ is None
        assert "\n" not in str(error.value)

    refused(r"w.pth does not fit this network: it lacks blocks.2.norm1.weight, .* more$", depth=3)
    refused(r"the network has no blocks.1.norm1.weight, .* and 9 more$", depth=1)
    refused(r"blocks.0.mlp.fc1.weight is \(64, 16\) there and \(32, 16\) here", mlp_ratio=2)
    torch.save([1, 2], path)
    refused("w.pth holds no weights by name")
    torch.save({"a": 3}, path)
    refused("w.pth holds no weights by name: 'a' is no tensor")
    torch.save(torch.nn.Linear(1, 1), path)  # a pickle of code
    refused("w.pth cannot be read as weights")
    path.write_bytes(b"nothing")
    refused("w.pth cannot be read as weights")
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"w.safetensors cannot be read as weights"):
        Timm("vit_tiny_patch16_224", 5, tmp_path / "w.safetensors", SMALL)
    path.unlink()
    refused("there is no file .*w.pth of weights; nothing is downloaded")
    other = {n: t for n, t in state.items() if n != "cls_token"}
    torch.save(other, path)
    refused("it lacks cls_token")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Timm("swin_tiny_patch4_window7"),
            "timm has no .*mean swin_tiny_patch4_window7_224",
        ),
        (lambda: Timm("hf_hub:timm/resnet18.a1_in1k"), "timm has no classifier 'hf_hub:"),
        (lambda: Timm("local-dir:/tmp"), "timm has no classifier 'local-dir:"),
        (lambda: Timm("vit_tiny_patch16_224", options={"size": 3}), "made: .*argument 'size'"),
        (lambda: Timm("resnet18", 0), "num_classes=0: must be at least 1"),
        (
            lambda: Torchvision("resnet81"),
            "torchvision has no classifier 'resnet81'.*mean resnet18",
        ),
        (lambda: Torchvision("fcn_resnet50"), "torchvision has no classifier 'fcn_resnet50'"),
        (lambda: Torchvision("resnet18", options={"size": 3}), "made: .*argument 'size'"),
        (lambda: ViT(image_size=30), "image_size=30: must be a multiple of patch_size=4"),
        (lambda: ViT(dim=100), "dim=100: must be a multiple of heads=3"),
        (lambda: ViT(depth=0), "depth=0: must be at least 1"),
        (lambda: ViT(num_classes=0), "num_classes=0: must be at least 1"),
        (lambda: ViT(drop_path=1.0), r"drop_path=1.0: must be in \[0, 1\)"),
        (
            lambda: SwinTiny(48, 4),
            "give 12 x 12 patches, which stage 2 cannot cut into windows of 4",
        ),
        (lambda: SwinTiny(dim=32), "dim=32: stage 1 has 32 channels, no multiple of its 3 heads"),
        (lambda: SwinTiny(heads=(3,)), r"depths=\[2, 2, 6, 2\]: as many stages as heads=\[3\] has"),
    ],
)
def test_what_cannot_be_made_is_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert error.value.__cause__ is error.value.__context__ is None


@pytest.mark.parametrize(
    ("library", "make"),
    [("timm", ViT), ("timm", SwinTiny), ("timm", small_timm), ("peft", partial(LoRA, ResNet18))],
)
def test_a_library_that_is_missing_is_named(library, make, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"needs {library}, which is not installed: pip install"):
        make()


# -- the command ----------------------------------------------------------------------------------

VIT = {
    "class_path": "ViT",
    "init_args": {
        "image_size": 8,
        "patch_size": 2,
        "in_channels": 1,
        "num_classes": 10,
        "dim": 16,
        "depth": 2,
        "heads": 2,
    },
}


def network_yaml(network, path):
    task = {"class_path": "Classification", "init_args": {"network": network, "num_classes": 10}}
    path.write_text(yaml.safe_dump({"model": {"task": task}}))
    return "-c", str(path)


def rows(run):
    with open(run / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_fit_trains_a_vit_by_its_short_name(tmp_path):
    flags = network_yaml(VIT, tmp_path / "vit.yaml")
    run = fit("fedmuon", tmp_path, *flags, "--server.clients_per_round", "2", rounds=2)
    first, last = rows(run)
    assert last["train/loss"] < first["train/loss"]
    assert 0 < last["fed/orthogonality"] < 1.5


def test_fit_trains_lora_on_a_file_and_sends_what_is_trained_only(tmp_path):
    # The file has 5 classes, the data 10: the head is new.
    state = saved(small_timm(), tmp_path / "w.safetensors", "safetensors")
    base = {
        "class_path": "Timm",
        "init_args": {
            "name": "vit_tiny_patch16_224",
            "num_classes": 10,
            "pretrained_file": str(tmp_path / "w.safetensors"),
            "options": SMALL,
        },
    }
    network = {"class_path": "LoRA", "init_args": {"network": base, "rank": 2}}
    flags = network_yaml(network, tmp_path / "lora.yaml")
    with pytest.warns(UserWarning, match="head of 5 classes, not 10"):
        run = fit("fedmuon", tmp_path, *flags, "--server.clients_per_round", "2", rounds=2)
    factors = 2 * 2 * ((16 + 48) + (16 + 16))  # two blocks, rank 2, qkv and proj
    d, matrices = factors + 170, factors + 160
    for row in rows(run):
        # Up d and the momentum of the matrices, down Delta_g as well; float32, two clients.
        assert row["comm/up_mb"] == pytest.approx(2 * 4 * (d + matrices) / 1e6)
        assert row["comm/down_mb"] == pytest.approx(2 * 4 * (2 * d + matrices) / 1e6)
    kept = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, t in state.items():
        layer, _, kind = name.rpartition(".")
        at = next(n for n in (name, f"{layer}.base_layer.{kind}") if f"network.net.{n}" in kept)
        if not name.startswith("head"):
            assert torch.equal(kept[f"network.net.{at}"], t), name
    moved = [t for n, t in kept.items() if "lora_B" in n]
    assert len(moved) == 4
    assert all(float(t.abs().max()) > 0 for t in moved)


def test_a_wrong_name_is_one_sentence(tmp_path, capsys):
    network = {"class_path": "Timm", "init_args": {"name": "resnet_18", "num_classes": 10}}
    flags = network_yaml(network, tmp_path / "net.yaml")
    assert main(arguments("fit", "fedavg", tmp_path, *flags)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("fedmuon: timm has no classifier 'resnet_18'; did you mean ")
