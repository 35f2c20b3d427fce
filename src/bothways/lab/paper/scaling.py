"""Loss by parameters and tokens: L = E + A / N^α + B / D^β, fitted to finished runs.

Least squares, in nats: for given exponents the rest is linear in numbers that are not negative, so
only the exponents are searched. Intervals are percentiles of a bootstrap of the residuals, which
keeps the sizes of the runs. Where all runs have as many tokens (or parameters), this term cannot
be told from E and is part of it.

Source: Hoffmann et al. 2022 (approach 3, where the loss is Huber's, of logarithms); Kaplan et al.
2020 (N without the embedding tables).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

RESAMPLES = 200
"""Bootstrap samples of the intervals."""
EXPONENTS = (0.02, 3.0)
"""The exponents that are searched; an interval that reaches an end determines nothing."""
_LEVEL = 1.1
"""The ratio from which two numbers of parameters or tokens are different ones."""
_TOGETHER = 0.95
"""The correlation of log N and log D from which their effects cannot be told apart."""


@dataclass(frozen=True)
class Estimate:
    """A fitted number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingFit:
    """The fit of losses by parameters and tokens.

    Attributes:
        problem: what the runs do not determine; "" if they determine all.
        irreducible: E, in nats; None without a fit.
        exponents: α under "parameters", β under "tokens", of the terms that vary.
        nats: the value of each term at its centre.
        centres: the geometric means of parameters and tokens.
        deviation: the standard deviation of the residuals, in nats.
    """

    problem: str
    irreducible: Estimate | None = None
    exponents: Mapping[str, Estimate] = field(default_factory=dict)
    nats: Mapping[str, Estimate] = field(default_factory=dict)
    centres: Mapping[str, float] = field(default_factory=dict)
    deviation: float = math.nan

    def loss(self, **sizes: float) -> float:
        """Return the fitted loss of a run, by its `parameters` and `tokens`."""
        assert self.irreducible is not None
        terms = (
            nats.value * (sizes[name] / self.centres[name]) ** -self.exponents[name].value
            for name, nats in self.nats.items()
        )
        return float(self.irreducible.value + sum(terms))


def fit_scaling(
    losses: Float64[np.ndarray, " runs"],
    sizes: Mapping[str, Float64[np.ndarray, " runs"]],
    seed: int = 0,
) -> ScalingFit:
    """Fit the losses of runs, in nats.

    Args:
        sizes: of each run: `parameters` and `tokens`.
        seed: random seed of the bootstrap.
    """
    levels = {
        name: 1 + int((np.diff(np.sort(np.log(values))) > math.log(_LEVEL)).sum())
        for name, values in sizes.items()
    }
    names = [name for name, count in levels.items() if count > 1]
    different = len({*zip(*(sizes[name] for name in names or sizes), strict=True)})
    if different < (needed := max(4, 2 * len(names) + 2)):
        return ScalingFit(
            f"a fit needs {needed} runs of different sizes, and there are {different}"
        )
    if few := [name for name in names if levels[name] == 2]:
        return ScalingFit(f"an exponent needs three different numbers of {' and '.join(few)}")
    centres = {name: float(np.exp(np.log(sizes[name]).mean())) for name in names}
    scaled = np.stack([np.log(sizes[name] / centres[name]) for name in names])
    if len(names) == 2 and abs(np.corrcoef(scaled)[0, 1]) > _TOGETHER:
        return ScalingFit("parameters and tokens vary together, so their effects are not separable")
    powers, linear = _solve(scaled, losses)
    fitted = _design(scaled, powers) @ linear
    residuals, freedom = losses - fitted, len(losses) - 2 * len(names) - 1
    spread = residuals * math.sqrt(len(losses) / freedom)
    draws = np.random.default_rng(seed)
    samples = np.array(
        [
            np.concatenate(_solve(scaled, fitted + draws.choice(spread, len(losses)), powers))
            for _ in range(RESAMPLES)
        ]
    )
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    estimates = [Estimate(*map(float, x)) for x in zip([*powers, *linear], low, high, strict=True)]
    exponents = dict(zip(names, estimates, strict=False))
    unknown = [
        name
        for name, x in exponents.items()
        if x.low < 1.05 * EXPONENTS[0] or x.high > 0.95 * EXPONENTS[1]
    ]
    return ScalingFit(
        f"the runs do not determine the exponent of {' and '.join(unknown)}" if unknown else "",
        estimates[len(names)],
        exponents,
        dict(zip(names, estimates[len(names) + 1 :], strict=True)),
        centres,
        float(np.sqrt((residuals**2).sum() / freedom)),
    )


def _design(
    scaled: Float64[np.ndarray, "terms runs"], powers: Float64[np.ndarray, " terms"]
) -> Float64[np.ndarray, "runs columns"]:
    """Return a column of ones, and the power of each term."""
    columns = np.vstack([np.ones(scaled.shape[1]), np.exp(-powers[:, None] * scaled)])
    return np.ascontiguousarray(columns.T)


def _solve(
    scaled: Float64[np.ndarray, "terms runs"],
    losses: Float64[np.ndarray, " runs"],
    start: Float64[np.ndarray, " terms"] | None = None,
) -> tuple[Float64[np.ndarray, " terms"], Float64[np.ndarray, " columns"]]:
    """Return the exponents and the linear numbers of least squares, from the best of a grid.

    Args:
        start: exponents to try, too, with a grid that is coarser.
    """
    from scipy import optimize

    def error(logarithms: Float64[np.ndarray, " terms"]) -> float:
        return float(optimize.nnls(_design(scaled, np.exp(logarithms)), losses)[1])

    bounds = low, high = math.log(EXPONENTS[0]), math.log(EXPONENTS[1])
    grid = np.meshgrid(*[np.linspace(low, high, 12 if start is None else 4)] * len(scaled))
    starts = [np.log(start)] if start is not None else []
    starts += [np.array(point) for point in zip(*map(np.ravel, grid), strict=True)]
    best = optimize.minimize(
        error, min(starts, key=error), method="Nelder-Mead", bounds=[bounds] * len(scaled)
    )
    powers = np.exp(best.x)
    return powers, optimize.nnls(_design(scaled, powers), losses)[0]
