"""Which parameters are matrices for Muon, and which go to another optimiser."""

import re
from collections.abc import Mapping, Sequence

import torch

__all__ = ["matrix_share", "split_parameters"]


def split_parameters(
    shapes: Mapping[str, torch.Size], rest_patterns: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Split parameters, by axes and by name, into matrices and the rest.

    Args:
        shapes: Shape of each parameter by name, without a client axis.
        rest_patterns: Regular expressions; a name in which one of them is found (``re.search``)
            goes to the rest whatever its shape, such as embeddings or the head.

    Returns:
        The names of the matrices (2 or more axes, no pattern found) and of the rest, each in the
        given order.

    Raises:
        ValueError: If a pattern is no regular expression, or is found in no name.
    """
    excluded: set[str] = set()
    for pattern in rest_patterns:
        try:
            found = {name for name in shapes if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"rest_patterns: {pattern!r} is no regular expression: {error}"
            ) from error
        if not found:
            raise ValueError(f"rest_patterns: {pattern!r} is found in no parameter's name")
        excluded |= found
    matrices = [n for n, shape in shapes.items() if len(shape) >= 2 and n not in excluded]
    chosen = set(matrices)
    return matrices, [name for name in shapes if name not in chosen]


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
