"""Scores of a variant beside those of the exact model on the same tokens."""

from dataclasses import dataclass, field

import numpy as np

from serving.quality.scorer import Score
from serving.quality.statistics import Estimate, estimate


@dataclass(frozen=True)
class Row:
    """One line of the report. nats, exact: of a token, by the variant and by the exact model;
    difference: of the two, token by token; agreement: how often both find the same id likeliest.
    """

    study: str
    variant: str
    condition: str
    nats: Estimate
    exact: Estimate
    difference: Estimate
    agreement: Estimate


@dataclass
class Pairs:
    """Scores of the same tokens, and the clusters that they belong to."""

    variant: list[Score] = field(default_factory=list)
    exact: list[Score] = field(default_factory=list)
    clusters: list[int] = field(default_factory=list)

    def add(self, variant: Score, exact: Score, cluster: int) -> None:
        if variant.nats.shape != exact.nats.shape:
            raise ValueError(f"{variant.nats.shape=} must be {exact.nats.shape=}")
        self.variant.append(variant)
        self.exact.append(exact)
        self.clusters.append(cluster)

    def extend(self, other: "Pairs") -> None:
        self.variant += other.variant
        self.exact += other.exact
        self.clusters += other.clusters

    def row(self, study: str, variant: str, condition: str = "") -> Row:
        own, exact = (
            np.concatenate([score.nats for score in scores]).astype(np.float64)
            for scores in (self.variant, self.exact)
        )
        pairs = zip(self.variant, self.exact, strict=True)
        same = np.concatenate([a.best == b.best for a, b in pairs])
        clusters = np.repeat(self.clusters, [score.nats.size for score in self.variant])
        found = (estimate(values, clusters) for values in (own, exact, own - exact, same))
        return Row(study, variant, condition, *found)
