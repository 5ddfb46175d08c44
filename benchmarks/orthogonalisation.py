"""Error and time of every way to orthogonalise; writes the table of docs/orthogonalisation.md.

    OMP_NUM_THREADS=1 python benchmarks/orthogonalisation.py --write docs/orthogonalisation.md

Errors are spectral norms of the difference from float64: "iteration" from the same iteration in
float64, and "polar" from U V^T of the float64 SVD over the singular values above 1e-10 of the
largest. The first is what arithmetic costs, the second what the method leaves. Singular values are
spaced evenly in the logarithm. Times are the least of 60 calls in turns, of a matrix by itself.
"""

import argparse
import platform
import re
import time
from functools import partial
from pathlib import Path

import torch

from fedmuon_pl.optim.orthogonalize import _iterate, _iterate_gram, polar_svd
from fedmuon_pl.optim.polynomials import POLAR_EXPRESS, QUINTIC

CONDITIONS = (1, 1e1, 1e2, 1e4, 1e6, 1e8)
SHAPES = {"wide": (120, 400), "tall": (400, 120), "square": (120, 120)}
TIMED = {"LeNet fc1": (120, 400), "LeNet fc2": (84, 120), "ResNet stage 3": (256, 2304)}


def matrix(shape, condition=None, rank=None, seed=0):
    """Random singular vectors, given singular values, in float64."""
    g = torch.Generator().manual_seed(seed)
    size = min(shape)
    u, v = (
        torch.linalg.qr(torch.randn(n, size, generator=g, dtype=torch.float64))[0] for n in shape
    )
    s = torch.ones(size, dtype=torch.float64)
    if rank is not None:
        s[rank:] = 0
    elif condition != 1:
        s = torch.logspace(0, -float(torch.tensor(condition).log10()), size, dtype=torch.float64)
    return (u * s) @ v.T


def scaled(x):
    return x / torch.linalg.vector_norm(x)


def aol(x):
    """Turbo-Muon's start (arXiv 2512.04632): row i of a wide X over sqrt(sum_j |X X^T|_ij).

    The singular values then are at most 1 and closer to it, so that one step fewer is made. It
    scales rows, and so is the start of another matrix: its polar factor is not that of X.
    """
    x = scaled(x)
    return x / (x @ x.mT).abs().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)


def wide(form):
    return lambda x, schedule: (
        form(x.mT, schedule).mT if x.shape[0] > x.shape[1] else form(x, schedule)
    )


FORMS = {
    "plain": lambda x, s: _iterate(scaled(x), s),
    "Gram": lambda x, s: _iterate_gram(scaled(x), s),
    "AOL": lambda x, s: _iterate(aol(x), s),
}
SCHEDULES = {
    "quintic, 5": [QUINTIC] * 5,
    "quintic, 4": [QUINTIC] * 4,
    "Polar Express, 5": list(POLAR_EXPRESS[:5]),
    "Polar Express, 8": list(POLAR_EXPRESS),
}
VARIANTS = [  # form, schedule, dtype
    *[
        (form, s, torch.float32)
        for s in SCHEDULES
        if s != "quintic, 4"
        for form in ("plain", "Gram")
    ],
    ("AOL", "quintic, 4", torch.float32),
    ("plain", "quintic, 5", torch.bfloat16),
    ("Gram", "quintic, 5", torch.bfloat16),
    ("plain", "Polar Express, 5", torch.bfloat16),
]


def variant_name(form, schedule, dtype):
    return f"{schedule}, {form}, {str(dtype).removeprefix('torch.')}"


def spectral(difference):
    return torch.linalg.matrix_norm(difference, 2).item()


def least(functions, rounds=60):
    """The least milliseconds of CPU of this thread for each, in turns; slow ones have fewer."""
    found = {name: [] for name in functions}
    for r in range(rounds):
        for name, function in functions.items():
            if r < 5 or found[name][-1] < 0.2:
                begin = time.thread_time()
                function()
                found[name].append(time.thread_time() - begin)
    return {name: 1e3 * min(values) for name, values in found.items()}


def errors():
    cases = [(f"{c:.0e}".replace("e+0", "e"), {"condition": c}) for c in CONDITIONS]
    cases.append(("rank 8", {"rank": 8}))
    lines = [
        "| variant | error of | shape | " + " | ".join(name for name, _ in cases) + " |",
        "|---|---|---|" + "---:|" * len(cases),
    ]
    rows = {}
    for shape_name, shape in SHAPES.items():
        for _, arguments in cases:
            m = matrix(shape, **arguments)
            polar = polar_svd(m)
            for form, schedule, dtype in VARIANTS:
                run = wide(FORMS[form])
                exact = run(m, SCHEDULES[schedule])
                found = run(m.to(dtype), SCHEDULES[schedule]).double()
                name = variant_name(form, schedule, dtype)
                row = rows.setdefault(name, {}).setdefault(shape_name, ([], []))
                row[0].append(f"{spectral(found - exact):.0e}")
                row[1].append(f"{spectral(found - polar):.2f}")
            found = polar_svd(m.float()).double()
            row = rows.setdefault("SVD, float32", {}).setdefault(shape_name, ([], []))
            row[0].append("")
            row[1].append(f"{spectral(found - polar):.0e}")
    for name, shapes in rows.items():
        for kind, label in enumerate(("iteration", "polar")):
            for shape_name, row in shapes.items():
                if any(row[kind]):
                    lines.append(
                        f"| {name} | {label} | {shape_name} | " + " | ".join(row[kind]) + " |"
                    )
    return lines


def timed(shape):
    """Milliseconds of every variant, by name."""
    m = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    functions = {
        variant_name(*v): partial(wide(FORMS[v[0]]), m.to(v[2]), SCHEDULES[v[1]]) for v in VARIANTS
    }
    return least({**functions, "SVD, float32": partial(polar_svd, m)})


def times():
    columns = [timed(shape) for shape in TIMED.values()]
    lines = [
        "| variant | " + " | ".join(f"{n} {r} x {c}" for n, (r, c) in TIMED.items()) + " |",
        "|---|" + "---:|" * len(TIMED),
    ]
    for name in columns[0]:
        lines.append(f"| {name} | " + " | ".join(f"{c[name]:.2f}" for c in columns) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="the file between whose marks the tables go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    )
    text = "\n".join(
        [
            "Errors, by the ratio of the largest to the smallest singular value:",
            "",
            *errors(),
            "",
            f"Milliseconds of CPU on one thread ({machine}):",
            "",
            *times(),
        ]
    )
    print(text)
    if options.write:
        page = options.write.read_text()
        marks = re.compile("(?<=<!-- tables -->\n).*(?=<!-- end -->)", re.S)
        options.write.write_text(marks.sub(lambda _: f"\n{text}\n\n", page))


if __name__ == "__main__":
    main()
