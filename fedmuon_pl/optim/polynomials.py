"""The polynomials that orthogonalise, and how those of Polar Express are found."""

import math

import numpy as np

__all__ = ["POLAR_EXPRESS", "QUINTIC", "Triple", "polar_express_coefficients"]

Triple = tuple[float, float, float]
"""(a, b, c) of the odd polynomial a x + b x^3 + c x^5."""

#: (a, b, c) of every step of Muon (K. Jordan et al.,
#: "Muon: An optimizer for hidden layers in neural networks", 2024).
QUINTIC: Triple = (3.4445, -4.7750, 2.0315)

#: ``polar_express_coefficients(8)``, the schedule of Algorithm 1 of arXiv 2505.16932. Fewer steps
#: use the first ones, more repeat the last.
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.205160414005567, -22.901934987056013, 16.460724910180286),
    (4.066395159942775, -2.861154086755143, 0.5183995226694742),
    (3.9095949044379195, -2.823351735039518, 0.5250369769390026),
    (3.285564017198612, -2.415301959635944, 0.48529406552790877),
    (2.2778732870839775, -1.6198217652654416, 0.3984807870416836),
    (1.8725756512746552, -1.2307042574884377, 0.3585161620951205),
    (1.8564371097246317, -1.21323928185728, 0.3567997893837491),
    (1.875, -1.25, 0.375),
)


def polar_express_coefficients(
    steps: int, lower: float = 1e-3, safety: float = 1.01, cushion: float = 0.02407327424182761
) -> tuple[Triple, ...]:
    """The Polar Express schedule: at each step the best odd quintic for the interval then left.

    Singular values start in ``[lower, 1]``. Each step takes the polynomial that minimises the
    largest distance from 1 over the present interval (Theorem 4.1), which it maps to a shorter one
    around 1. Two changes serve low precision (section 4.4): the solve takes the interval as no
    wider than ``[cushion * upper, upper]``, as the optimum would press some large singular values
    to almost 0; and all polynomials but the last are evaluated at ``x / safety``, so that a value
    that rounding pushed past ``upper`` cannot diverge.

    Args:
        steps: Number of polynomials, at least 1.
        lower: Assumed smallest singular value, in (0, 1). Smaller ones converge too, only later.
        safety: At least 1.
        cushion: In [0, 1); the default is the one of appendix G.

    Returns:
        ``steps`` triples (a, b, c).

    Raises:
        ValueError: If an argument is out of its range.

    Source: N. Amsel, D. Persson, C. Musco, R. Gower, arXiv 2505.16932, sections 4.1 to 4.4.
    """
    if steps < 1 or not 0 < lower < 1 or safety < 1 or not 0 <= cushion < 1:
        raise ValueError(
            "polar_express_coefficients needs steps >= 1, 0 < lower < 1, safety >= 1 and "
            f"0 <= cushion < 1, got {steps=}, {lower=}, {safety=}, {cushion=}"
        )
    low, high = lower, 1.0
    schedule = []
    for step in range(steps):
        a, b, c = _minimax_quintic(max(low, cushion * high), high)
        # A cushioned polynomial is centred for the interval it was solved on; centre it for ours.
        ends = [x * (a + x * x * (b + x * x * c)) for x in (low, high)]
        a, b, c = (2 * k / sum(ends) for k in (a, b, c))
        low = 2 * ends[0] / sum(ends)
        high = 2 - low
        shrink = safety if step < steps - 1 else 1.0
        schedule.append((a / shrink, b / shrink**3, c / shrink**5))
    return tuple(schedule)


def _minimax_quintic(low: float, high: float) -> Triple:
    """The odd quintic p that minimises max |1 - p(x)| over [low, high], by Remez exchange.

    At the optimum the error has one size and alternating signs at both ends and both interior
    extrema. Exchange solves for p given four points, then moves the inner ones to p's extrema.
    """
    middle, half = (high**2 + low**2) / 2, (high**2 - low**2) / 2
    if half < 1e-5:  # here p equals its limit to 1e-10, and the solve below would only add rounding
        centre = (low + high) / 2
        return 15 / 8 / centre, -10 / 8 / centre**3, 3 / 8 / centre**5
    # p(x) = x q(t) with t = (x^2 - middle) / half in [-1, 1] and q in Chebyshev's basis, since the
    # powers of x are almost dependent on a short interval.
    t = np.array([-1.0, -0.5, 0.5, 1.0])
    error = math.inf
    for _ in range(50):
        x = np.sqrt(middle + half * t)
        system = np.column_stack([x, x * t, x * (2 * t * t - 1), [1.0, -1.0, 1.0, -1.0]])
        q0, q1, q2, new_error = np.linalg.solve(system, np.ones(4))
        slope, offset = 1 / half, -middle / half
        a = float(q0 + q1 * offset + q2 * (2 * offset**2 - 1))
        b = float(q1 * slope + 4 * q2 * slope * offset)
        c = float(2 * q2 * slope**2)
        if abs(new_error - error) < 1e-15:
            break
        error = new_error
        extrema = np.sort(np.roots([5 * c, 3 * b, a]).real)  # p' is a quadratic in x^2
        t = np.array([-1.0, *((extrema - middle) / half), 1.0])
    return a, b, c
