"""Means with standard errors, of values that depend on each other within clusters."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean of ``count`` values and its standard error; NaN for one cluster."""

    mean: float
    error: float
    count: int
    clusters: int

    @property
    def z(self) -> float:
        """The mean in standard errors; 0 if both are 0."""
        if self.error:
            return self.mean / self.error
        return math.copysign(math.inf, self.mean) if self.mean else 0.0


def estimate(values: np.ndarray, clusters: np.ndarray) -> Estimate:
    """The mean of values [n] in clusters int [n].

    The error is that of a ratio of sums over clusters, which are independent of each other:
    G / (G - 1) times the sum of squares of the clusters' deviations, rooted, over n.
    """
    values = np.asarray(values, np.float64)
    if not values.size or values.shape != clusters.shape:
        raise ValueError(f"{values.shape=} must be {clusters.shape=} and not empty")
    _, own = np.unique(clusters, return_inverse=True)
    mean, groups = float(values.mean()), int(own.max()) + 1
    deviations = np.bincount(own, weights=values - mean)
    error = math.nan
    if groups > 1:
        error = math.sqrt(groups / (groups - 1) * float(np.sum(deviations**2))) / values.size
    return Estimate(mean, error, values.size, groups)


def ratio(parts: np.ndarray, wholes: np.ndarray) -> Estimate:
    """Sum of parts [G] over sum of wholes [G], one of each a cluster; NaN without any whole."""
    parts, wholes = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    total, groups = float(wholes.sum()), len(wholes)
    if not total:
        return Estimate(math.nan, math.nan, 0, groups)
    mean, error = float(parts.sum()) / total, math.nan
    if groups > 1:
        squares = float(np.sum((parts - mean * wholes) ** 2))
        error = math.sqrt(groups / (groups - 1) * squares) / total
    return Estimate(mean, error, round(total), groups)
