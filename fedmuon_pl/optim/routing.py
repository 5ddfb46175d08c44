"""Which parameters are matrices for Muon, and which go to another optimiser."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

__all__ = ["matrix_share", "split_parameters"]


def split_parameters(
    shapes: Mapping[str, torch.Size],
    rest_patterns: Sequence[str] = (),
    matrix_patterns: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Split parameters, by axes and by name, into matrices and the rest.

    Args:
        shapes: Shape of each parameter by name, without a client axis.
        rest_patterns: Regular expressions; a name in which one of them is found (``re.search``)
            goes to the rest whatever its shape, such as embeddings or the head.
        matrix_patterns: If there are any, only names in which one of them is found may be
            matrices, such as the projections of a Transformer; ``rest_patterns`` come first.

    Returns:
        The names of the matrices (2 or more axes, patterns permitting) and of the rest, each in
        the given order.

    Raises:
        ValueError: If a pattern is no regular expression, or is found in no name, or in that of no
            parameter of 2 or more axes where matrices are named.
    """
    tall = {n: shape for n, shape in shapes.items() if len(shape) >= 2}
    excluded = _named("rest_patterns", rest_patterns, shapes, "parameter's name")
    allowed = _named("matrix_patterns", matrix_patterns, tall, "name of a matrix")
    chosen = (allowed if matrix_patterns else tall.keys()) - excluded
    return [n for n in shapes if n in chosen], [n for n in shapes if n not in chosen]


def _named(key: str, patterns: Sequence[str], names: Iterable[str], what: str) -> set[str]:
    """The names in which at least one pattern is found."""
    out: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from error
        if not found:
            raise ValueError(f"{key}: {pattern!r} is found in no {what}")
        out |= found
    return out


def matrix_share(shapes: Mapping[str, torch.Size], rest_patterns: Sequence[str] = ()) -> float:
    """Share of all parameter elements that Muon orthogonalises, in [0, 1]; 0 if there are none.

    Args:
        shapes: As in :func:`split_parameters`.
        rest_patterns: As in :func:`split_parameters`.

    Raises:
        ValueError: As in :func:`split_parameters`.
    """
    matrices, _ = split_parameters(shapes, rest_patterns)
    total = sum(shape.numel() for shape in shapes.values())
    return sum(shapes[name].numel() for name in matrices) / total if total else 0.0
