"""LoRA: low-rank updates of a frozen network, through peft (the extra ``models``)."""

import re
from collections.abc import Callable, Sequence

from torch import nn

from ..errors import ConfigError
from .library import FromLibrary, optional

__all__ = ["LoRA"]


class LoRA(FromLibrary):
    """A frozen network whose named linear layers learn a low-rank update: W + (alpha / rank) B A.

    A (rank, in) starts at random and B (out, rank) at zero, so that x^0 is the network as it was.
    Only the factors and ``also_train`` are trained; what is frozen is neither averaged, nor sent,
    nor decayed. For Muon each factor is a matrix of its own, as in the released code of FedMuon.
    Averaging factors is not averaging their products: mean(B) mean(A) is not mean(B A), which is
    how the released code does it, too.

    The released code of FedMuon averages the factors only, and lets a head that each client trains
    fall (its FedAvg averages the head, too); here whatever is trained is averaged, for every
    method.

    Args:
        network: Makes the network, or the network, which is then changed in place.
        rank: r, the inner size of the factors; 16 in the released code's language runs.
        alpha: Scale of the update; 2 rank if None, as the released code has it for ViT and Swin.
        dropout: Of the factors' input, in [0, 1); 0.05 in the released code. It draws random
            numbers, and so clients train one at a time.
        target_modules: Ends of names of the layers that get an update. Those of timm's attention
            by default, as in the released code.
        also_train: Regular expressions; parameters in whose name one is found are trained whole.

    Raises:
        ConfigError: If peft is not installed, or a name fits nothing.
        ValueError: If a number is out of range.

    Source: E. Hu et al., arXiv 2106.09685, section 4.1; ``main_FedMuon.py`` of
    github.com/junkangLiu0/FedMuon at f3972e2, lines 103 to 112.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] | nn.Module,
        rank: int = 16,
        alpha: float | None = None,
        dropout: float = 0.0,
        target_modules: Sequence[str] = ("attn.qkv", "attn.proj"),
        also_train: Sequence[str] = ("head",),
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank={rank}: must be at least 1")
        if alpha is not None and not alpha > 0:
            raise ValueError(f"alpha={alpha}: must be positive")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout}: must be in [0, 1)")
        peft = optional("peft", "LoRA")
        net = network if isinstance(network, nn.Module) else network()
        if isinstance(net, FromLibrary):
            net = net.net  # one `net.` in front of names is enough
        layers = [n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for target in target_modules:
            if not any(n == target or n.endswith(f".{target}") for n in layers):
                last = ", ".join(layers[-3:])
                raise ConfigError(
                    f"target_modules: no layer's name ends in {target!r}; the last are {last}"
                )
        for pattern in also_train:
            if not any(re.search(pattern, n) for n, _ in net.named_parameters()):
                raise ConfigError(
                    f"also_train: {pattern!r} is found in no parameter's name; the last layer is "
                    f"{layers[-1]}"
                )
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=rank,
                lora_alpha=2 * rank if alpha is None else alpha,
                lora_dropout=dropout,
                target_modules=list(target_modules),
                bias="none",
            ),
            net,
        )
        for name, p in net.named_parameters():
            p.requires_grad_("lora_" in name or any(re.search(s, name) for s in also_train))
        super().__init__(net)
