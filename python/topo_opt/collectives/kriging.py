"""Smooth functions through measured points: Gaussian-process regression (kriging) with a mean of zero.

The function is the logarithm of measured over modelled time. Where points are far it goes back to zero, the model as it is;
noise keeps it from following every point. Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), 2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kernel = Callable[[Array, Array], Array]


class Kriging:
    """The mean of a Gaussian process given `values` at `places`.

    Args:
        kernel: covariance of the function at two sets of places, (a, d) and (b, d) -> (a, b).
        places: (points, d).
        values: (points,).
        noise: standard deviation of each value.
    """

    def __init__(self, kernel: Kernel, places: Array, values: Array, noise: float) -> None:
        self._kernel, self._places = kernel, places
        covariance = kernel(places, places) + noise**2 * np.eye(len(places))
        self._weights = np.linalg.solve(covariance, values)

    def __call__(self, places: Array) -> Array:
        """The function at `places`, (points, d) -> (points,)."""
        return self._kernel(places, self._places) @ self._weights


def matern32(distance: Array) -> Array:
    """Correlation of a function that is differentiable once, at distances in units of its length scale."""
    scaled = np.sqrt(3.0) * np.abs(distance)
    out: Array = (1.0 + scaled) * np.exp(-scaled)
    return out
