"""Standard errors of clustered values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.quality.statistics import Estimate, estimate, ratio

VALUES = np.random.default_rng(3).normal(size=60)


def test_clusters_of_one_value_give_the_textbook_error():
    found = estimate(VALUES, np.arange(60))
    assert found.mean == pytest.approx(VALUES.mean())
    assert found.error == pytest.approx(VALUES.std(ddof=1) / math.sqrt(60))
    assert (found.count, found.clusters) == (60, 60)


def test_repeating_every_value_of_a_cluster_says_nothing_new():
    clusters = np.repeat(np.arange(12), 5)
    once = estimate(VALUES, clusters)
    twice = estimate(np.tile(VALUES, 2), np.tile(clusters, 2))
    assert twice.error == pytest.approx(once.error)
    assert twice.count == 2 * once.count


def test_dependent_values_have_a_larger_error_than_independent_ones():
    shared = np.repeat(VALUES[:12], 5)
    clusters = np.repeat(np.arange(12), 5)
    expected = VALUES[:12].std(ddof=1) / math.sqrt(12)
    assert estimate(shared, clusters).error == pytest.approx(expected)
    assert estimate(shared, np.arange(60)).error < 0.6 * expected


def test_the_error_is_right_on_average():
    """Means of simulated clusters of unequal size scatter as the estimate says."""
    rng, sizes = np.random.default_rng(8), np.array([3, 9, 4, 12, 6, 5, 8, 10, 3, 7, 11, 6])
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    means, errors = [], []
    for _ in range(2000):
        values = np.repeat(rng.normal(size=len(sizes)), sizes) + rng.normal(size=len(clusters))
        found = estimate(values, clusters)
        means.append(found.mean)
        errors.append(found.error**2)
    assert math.sqrt(np.mean(errors)) == pytest.approx(np.std(means), rel=0.08)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=9))
def test_a_ratio_of_sums_is_the_mean_of_its_parts(clusters):
    wholes = np.array([whole for whole, _ in clusters])
    parts = np.array([min(part, whole) for whole, part in clusters])
    values = np.concatenate(
        [np.arange(whole) < part for whole, part in zip(wholes, parts, strict=True)]
    )
    direct = estimate(values, np.repeat(np.arange(len(wholes)), wholes))
    found = ratio(parts, wholes)
    assert found.mean == pytest.approx(direct.mean)
    assert found.error == pytest.approx(direct.error)


def test_one_cluster_has_no_error_and_nothing_has_no_mean():
    assert math.isnan(estimate(VALUES, np.zeros(60, int)).error)
    assert math.isnan(ratio(np.zeros(3), np.zeros(3)).mean)
    with pytest.raises(ValueError, match="must be"):
        estimate(VALUES, np.arange(59))


@pytest.mark.parametrize(
    ("mean", "error", "z"), [(3.0, 2.0, 1.5), (0.0, 0.0, 0.0), (-1.0, 0.0, -math.inf)]
)
def test_the_mean_in_errors(mean, error, z):
    assert Estimate(mean, error, 4, 4).z == z
