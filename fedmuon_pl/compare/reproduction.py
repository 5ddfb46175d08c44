"""Reproductions: a plan for each case of a published table, and the published numbers beside it.

A reproduction is a YAML file in ``configs/reproduce/``: ``plan`` as in ``configs/plan``, the
``cases`` of the table (such as two degrees of heterogeneity) with what each sets and what was
published for it, what the whole is ``expected`` to be, and how it shrinks to a ``smoke`` test.
"""

import dataclasses
import math
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .names import display_name
from .plan import Plan
from .plan_file import parse_plan
from .render import Grid
from .runs import RunData, flatten, read_yaml
from .summary import Stat, at_best, last

__all__ = ["Case", "Reproduction", "beside", "load_reproduction"]

Published = tuple[float, float | None]
"""Mean and spread, in percent."""


@dataclass(frozen=True, eq=False)
class Case:
    """One column of a published table.

    Attributes:
        name: Such as ``dir0.1``; the folder of its runs.
        experiment: Its YAML in ``configs/experiment``.
        set: What it sets in every run, by dotted key.
        published: Percent by the plan's label of the method; a range stands as its middle and half
            its width.
        notes: By the plan's label of a method, what is to be said in this column only.
    """

    name: str
    experiment: str
    set: Mapping[str, Any]
    published: Mapping[str, Published]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class Reproduction:
    """A checked file of ``configs/reproduce``.

    Attributes:
        name: Its name.
        title: The paper, data and network in a few words.
        source: Where the published numbers are from.
        plan: Methods, seeds and settings of every case.
        cases: The columns of the table.
        parameters: How many weights the network has.
        input_shape: Of one input, without a batch axis.
        test_samples: In the test set.
        expected: Settings of every full run, by dotted key, as published.
        parity: What the published numbers' own code did otherwise, by dotted key.
        smoke: What makes a run tiny, by dotted key.
        notes: By the plan's label of a method, how ours differs from what was published.
        against: The plan's label of the method that the others are tested against, the one of which
            the paper claims that it is better; None for all pairs.
        unlike: Labels of methods whose published number is of another variant: no difference.
        comparable: Whether the published numbers are of the same data and network; only then does a
            difference mean anything.
    """

    name: str
    title: str
    source: str
    plan: Plan
    cases: Sequence[Case]
    parameters: int
    input_shape: Sequence[int]
    test_samples: int
    expected: Mapping[str, Any]
    parity: Mapping[str, Any]
    smoke: Mapping[str, Any]
    notes: Mapping[str, str]
    against: str | None
    unlike: Sequence[str]
    comparable: bool

    def case_plan(self, case: Case, **changes: Any) -> Plan:  # noqa: ANN401
        """The plan of one case.

        Args:
            case: One of :attr:`cases`.
            **changes: Fields of the plan to replace; ``set`` is laid over the others' settings.
        """
        settings = {**self.plan.set, **case.set, **changes.pop("set", {})}
        name = f"{self.name}-{case.name}"
        return dataclasses.replace(
            self.plan, name=name, experiments=[case.experiment], set=settings, **changes
        )

    def check(self) -> int:
        """Checks the full runs against what was published: settings, and the network's size.

        Returns:
            How many settings were compared.

        Raises:
            ConfigError: With the first run and value that differ.
        """
        compared = 0
        for case in self.cases:
            for run in self.case_plan(case).runs():
                for key, value in self.expected.items():
                    if run.settings.get(key) != value:
                        raise ConfigError(
                            f"reproduction {self.name}: {run.name} has {key}="
                            f"{run.settings.get(key)!r}, and {value!r} is expected"
                        )
                    compared += 1
        settings = self.case_plan(self.cases[0]).runs()[0].settings
        network = build("network", settings, "meta")
        size = sum(p.numel() for p in network.parameters())
        if size != self.parameters:
            raise ConfigError(
                f"reproduction {self.name}: the network has {size:,} weights, and "
                f"{self.parameters:,} are expected"
            )
        return compared


_OPTIONAL = ("expected", "parity", "smoke", "notes", "against", "unlike", "comparable")
_KEYS = ("title", "source", "plan", "cases", "network", *_OPTIONAL)


def load_reproduction(name: str | Path) -> Reproduction:
    """Reads and checks a reproduction.

    Args:
        name: An existing file, or a short name such as ``lmo``: looked for as
            ``configs/reproduce/lmo.yaml`` here and then among the packaged configurations.

    Raises:
        ConfigError: If there is none, or it says something that cannot be.
    """
    from ..configuration import find_config

    path = Path(name)
    if not path.is_file():
        try:
            path = find_config(f"reproduce/{name}")
        except FileNotFoundError as error:
            raise ConfigError(f"there is no reproduction {str(name)!r}: {error}") from None
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    where = f"reproduction {path.stem}"
    for key in content:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}; allowed are {', '.join(_KEYS)}")
    missing = [key for key in _KEYS if key not in content and key not in _OPTIONAL]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    cases = [_case(f"{where}: case {key}", key, part) for key, part in content["cases"].items()]
    if not cases:
        raise ConfigError(f"{where}: cases should not be empty")
    network = content["network"]
    plan = parse_plan({"name": path.stem, "experiments": [cases[0].experiment], **content["plan"]})
    labels = {entry.label for entry in plan.entries}
    for case in cases:
        for said, about in (("number for", set(case.published)), ("note on", set(case.notes))):
            unknown = sorted(about - labels)
            if unknown:
                raise ConfigError(f"{where}: case {case.name} has a {said} {unknown[0]}, which "
                                  f"the plan does not run")  # fmt: skip
    notes, comparable = content.get("notes") or {}, content.get("comparable", True)
    against, unlike = content.get("against"), content.get("unlike") or []
    for what, named in (("a note on", notes), ("unlike:", unlike), ("against:", [against])):
        unknown = sorted({label for label in named if label is not None} - labels)
        if unknown:
            raise ConfigError(f"{where}: {what} {unknown[0]}, which the plan does not run")
    if not isinstance(comparable, bool):
        raise ConfigError(f"{where}: comparable should be true or false, not {comparable!r}")
    return Reproduction(
        name=path.stem,
        title=content["title"],
        source=content["source"],
        plan=plan,
        cases=cases,
        parameters=network["parameters"],
        input_shape=network["input"],
        test_samples=network["test_samples"],
        expected=flatten(content.get("expected") or {}),
        parity=flatten(content.get("parity") or {}),
        smoke=flatten(content.get("smoke") or {}),
        notes={label: str(note) for label, note in notes.items()},
        against=against,
        unlike=unlike,
        comparable=comparable,
    )


def _case(where: str, name: str, content: Mapping[str, Any]) -> Case:
    published = {}
    for label, value in (content.get("published") or {}).items():
        pair = value if isinstance(value, list) else [value, None]
        if len(pair) != 2 or not all(isinstance(v, int | float | None) for v in pair):
            raise ConfigError(f"{where}: {label} should be [mean, spread] in percent, not {value}")
        published[label] = (float(pair[0]), None if pair[1] is None else float(pair[1]))
    if "experiment" not in content:
        raise ConfigError(f"{where}: experiment is missing")
    notes = {label: str(note) for label, note in (content.get("notes") or {}).items()}
    return Case(name, content["experiment"], flatten(content.get("set") or {}), published, notes)


def build(what: str, settings: Mapping[str, Any], device: str = "cpu") -> Any:  # noqa: ANN401
    """The network or the algorithm that a run's settings name.

    Args:
        what: ``network``, ``algorithm`` or ``data``.
        settings: By dotted key, as of :attr:`~fedmuon_pl.compare.plan.Run.settings`.
        device: Where a network's weights are; ``meta`` has none.
    """
    import torch
    from jsonargparse import ArgumentParser

    from .. import models  # noqa: F401  # known by their short names once they are imported
    from ..algorithms import Algorithm
    from ..data import catalogue  # noqa: F401
    from ..data.datamodule import FederatedDataModule

    prefix, kind = {
        "data": ("data", FederatedDataModule),
        "network": ("model.task.init_args.network", torch.nn.Module),
        "algorithm": ("model.algorithm", Algorithm),
    }[what]
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        if key.startswith(f"{prefix}."):
            *parents, name = key.removeprefix(f"{prefix}.").split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = value
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--what", type=kind)
    try:
        config = parser.parse_object({"what": nested})
    except ArgumentError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{prefix} cannot be made of these settings: {reason}") from None
    with torch.device(device):
        return parser.instantiate(config).what


def beside(
    reproduction: Reproduction,
    case: Case,
    runs: Sequence[RunData],
    failed: Mapping[str, Mapping[int, str]] | None = None,
    caveat: str = "",
) -> tuple[Grid, list[str]]:
    """Ours beside the published numbers, and the difference, in percent.

    There is a difference only where the published number is of the same task and variant, of runs
    as long as ours, and where every seed finished.

    Args:
        reproduction: Whose case it is.
        case: The column.
        runs: Its finished runs; the accuracy is the test accuracy after the last round, and once
            more after the round that validation data would have chosen.
        failed: By label and seed, why the others did not finish.
        caveat: Why no number is to be compared with the published ones, such as a smoke test.

    Returns:
        The table, and what is to be said under it.
    """
    rows, notes, lost = [], [], failed or {}
    published_any = bool(case.published)
    compared = reproduction.comparable and not caveat
    untuned = []
    for label in [entry.label for entry in reproduction.plan.entries]:
        own = [run for run in runs if run.method == label]
        seeds = len(own) + len(lost.get(label, {}))
        published = case.published.get(label)
        if not seeds and published is None:
            continue
        stat = Stat.of(100 * last(run, "test/acc") for run in own)
        chosen = Stat.of(100 * at_best(run, "acc") for run in own)
        theirs, difference = "-", "-"
        if published is not None:
            mean, spread = published
            theirs = f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
            same = label not in reproduction.unlike
            if same and math.isfinite(stat.mean) and len(own) == seeds:
                difference = f"{stat.mean - mean:+.2f}"
        count = str(seeds) if len(own) == seeds else f"{len(own)} of {seeds}"
        ours = [s.text(2, len(own)) if own else "-" for s in (stat, chosen)]
        row = [display_name(label), _rate(own), count, *ours]
        rows.append([*row, theirs, *([difference] if compared else [])])
        entry = next(e for e in reproduction.plan.entries if e.label == label)
        if published_any and published is None and entry.tuned is False:
            untuned.append(display_name(label))
        for seed, reason in lost.get(label, {}).items():
            notes.append(f"{display_name(label)}, seed {seed}, did not finish: {reason}")
        for known in (reproduction.notes, case.notes):
            if label in known:
                notes.append(f"{display_name(label)}: {known[label]}")
    if untuned:
        notes.append(
            f"not in the published table, and at one rate, not tuned: {', '.join(untuned)}"
        )
    rounds = sorted({len(run.metrics) for run in runs})
    after = f"after {rounds[0]} rounds" if len(rounds) == 1 else "after the last round"
    caption = (
        f"Test accuracy in percent {after}, ours as mean ± sample standard deviation over the "
        f"seeds that finished; chosen round: after the round of the best validation accuracy "
        f"instead; lr: the learning rate of ours. All seeds share the partition. "
        f"Published: {reproduction.source}."
    )
    if caveat:
        caption = f"{caveat} {caption}"
    heads = ["method", "lr", "seeds", "ours", "chosen round", "published"]
    heads += ["difference"] if compared else []
    if not published_any:
        heads, rows = heads[:5], [row[:5] for row in rows]
    return Grid(f"{reproduction.title}, {case.name}", heads, rows, caption), notes


def _rate(runs: Sequence[RunData]) -> str:
    """The learning rate of a method's runs, as configured."""
    rates = {run.config.get("model.algorithm.init_args.lr") for run in runs}
    return ", ".join(f"{rate:g}" for rate in sorted(r for r in rates if r is not None)) or "-"
