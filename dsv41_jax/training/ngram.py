"""The n-gram model that a trained one has to beat: interpolated Kneser-Ney on the same tokens.

``python -m dsv41_jax.training.ngram --data FILE.npz --vocab-size 4096`` prints its held-out
perplexity.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from dsv41_jax.command import exit_status
from dsv41_jax.errors import UserError
from dsv41_jax.training.data import Corpus

DISCOUNT = 0.75


@dataclass(frozen=True)
class Order:
    """Counts of one order: n-grams as sorted keys, and sum and number of what follows each context.

    A context is a key without its last token; ``contexts`` are sorted.
    """

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    sums: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, counts: np.ndarray, bits: int) -> "Order":
        contexts, first = np.unique(keys >> bits, return_index=True)
        kinds = np.diff([*first.tolist(), len(keys)])
        return cls(keys, counts, contexts, np.add.reduceat(counts, first), kinds)


class KneserNey:
    """Probabilities after up to ``longest`` - 1 tokens; lower orders count different contexts."""

    def __init__(self, ids: np.ndarray, vocab_size: int, longest: int = 5):
        self.bits = (vocab_size - 1).bit_length()
        if self.bits * longest > 63:
            raise UserError(f"{vocab_size=} must be at most {2 ** (63 // longest)}")
        self.vocab_size, self.longest = vocab_size, longest
        keys, counts = np.unique(self._keys(ids, longest), return_counts=True)
        orders = [Order.of(keys, counts, self.bits)]
        for n in range(longest - 1, 0, -1):
            keys, counts = np.unique(keys & ((1 << n * self.bits) - 1), return_counts=True)
            orders.append(Order.of(keys, counts, self.bits))
        self.orders = orders[::-1]

    def nats(self, ids: np.ndarray) -> np.ndarray:
        """Negative log likelihood float64 [n - longest + 1] of ids [n] after the first
        ``longest`` - 1.
        """
        whole = self._keys(ids, self.longest)
        p = np.full(len(whole), 1 / self.vocab_size)
        for n, order in enumerate(self.orders, 1):
            keys = whole & ((1 << n * self.bits) - 1)
            counts = _found(order.keys, keys, order.counts)
            sums = _found(order.contexts, keys >> self.bits, order.sums)
            kinds = _found(order.contexts, keys >> self.bits, order.kinds)
            mixed = np.maximum(counts - DISCOUNT, 0) + DISCOUNT * kinds * p
            p = np.where(sums > 0, mixed / np.maximum(sums, 1), p)
        return -np.log(p)

    def _keys(self, ids: np.ndarray, n: int) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int64), n)
        keys = np.zeros(len(windows), np.int64)
        for column in range(n):
            keys = (keys << self.bits) | windows[:, column]
        return keys


def _found(keys: np.ndarray, wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values at the wanted keys, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.training.ngram")
    parser.add_argument("--data", required=True, metavar="FILE.npz")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--longest", type=int, default=5)
    arguments = parser.parse_args(argv)
    return exit_status(lambda: _report(arguments))


def held_out_nats(corpus: Corpus, vocab_size: int, longest: int = 5) -> np.ndarray:
    """Negative log likelihood float64 of each held-out token but the first ``longest`` - 1."""
    return KneserNey(corpus.train, vocab_size, longest).nats(corpus.held_out)


def _report(arguments: argparse.Namespace) -> None:
    corpus = Corpus.load(arguments.data, arguments.vocab_size)
    nats = held_out_nats(corpus, arguments.vocab_size, arguments.longest)
    mean, error = nats.mean(), nats.std() / np.sqrt(nats.size)
    print(
        f"{arguments.longest}-gram  tokens {nats.size}  mean nll {mean:.4f} +- {error:.4f} nats  "
        f"perplexity {np.exp(mean):.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
