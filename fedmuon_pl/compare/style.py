"""One method, one colour, in every figure and page.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart. A method's colour
depends on its name only, so that it is the same in every figure of a project.
"""

import zlib
from collections.abc import Sequence
from typing import Any

__all__ = ["dash_lengths", "distinct_styles", "method_style"]

_VERMILLION, _ORANGE, _BLUE, _GREEN = "#D55E00", "#E69F00", "#0072B2", "#009E73"
_PURPLE, _SKY, _GREY, _BLACK = "#CC79A7", "#56B4E9", "#7F7F7F", "#000000"
# Yellow, the palette's last, is too faint for lines on white; grey stands in for it.

_COLOURS = {
    "fedmuon": _VERMILLION,
    "local_muon": _ORANGE,
    "fedavg": _BLUE,
    "scaffold": _GREEN,
    "fedadam": _PURPLE,
    "fedprox": _SKY,
    "fedcm": _BLACK,
    "fedadamw": _GREY,
}
_OWN: dict[str, tuple[str, Any]] = {"fedmuon_lmo": (_SKY, "-.")}  # a method, not a variant
_PALETTE = (_VERMILLION, _ORANGE, _BLUE, _GREEN, _PURPLE, _SKY, _GREY, _BLACK)
_DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))


def method_style(method: str) -> tuple[str, Any]:
    """A method's colour and line style, a function of its name alone.

    The known methods have fixed colours and solid lines. Another one's line is dashed, so that it
    cannot be taken for a known one; its colour is that of the method of which it is a variant
    (``fedavg_momentum``), or comes from a hash of its name.
    """
    if method in _COLOURS:
        return _COLOURS[method], "-"
    if method in _OWN:
        return _OWN[method]
    number = zlib.crc32(method.encode())
    colour = _PALETTE[number % len(_PALETTE)]
    family = method
    while family := family.rpartition("_")[0]:
        if family in _COLOURS:
            colour = _COLOURS[family]
            break
    return colour, _DASHES[number // len(_PALETTE) % len(_DASHES)]


def distinct_styles(methods: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Each method's own style; where two would look the same, the later gets another dash."""
    styles: dict[str, tuple[str, Any]] = {}
    for name in sorted(methods):
        colour, dash = method_style(name)
        for other in _DASHES:
            if (colour, dash) not in styles.values():
                break
            dash = other
        styles[name] = (colour, dash)
    return styles


def dash_lengths(dash: Any) -> list[float]:  # noqa: ANN401
    """A Matplotlib line style as the lengths of its dashes and gaps, in line widths."""
    named = {"-": [], "--": [4.0, 2.0], ":": [1.0, 2.0], "-.": [5.0, 2.0, 1.0, 2.0]}
    return named[dash] if isinstance(dash, str) else list(map(float, dash[1]))
