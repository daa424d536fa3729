"""The text model in float64 NumPy, written from ARCHITECTURE.md alone: dense masks over the whole
sequence, no caches, nothing of the product.

Shapes: T rows, S streams, D hidden, H heads, G global entries of one owner.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tests.oracle_weights import load_tensors

GOLDENS = Path(__file__).resolve().parent / "goldens"
EPS = 1e-20


@dataclass
class Stream:
    """Rows on their way through the layers. position [T]; floor: lowest window position they see;
    picked [T, G] and allowed [T, G]: entries selected by the last index source, and in its
    candidate blocks.
    """

    h: np.ndarray
    pre: np.ndarray
    position: np.ndarray
    floor: int
    picked: np.ndarray | None = None
    allowed: np.ndarray | None = None

    def since(self, position: int) -> "Stream":
        """The rows from ``position`` on, which see no window below it."""
        keep = self.position >= position
        return Stream(*(a[keep] for a in (self.h, self.pre, self.position)), position,
                      self.picked[keep], self.allowed[keep])  # fmt: skip


# Global rows by owner layer: latents [G, head_dim] and index keys [G, index_head_dim], rotated.
Stored = dict[int, tuple[np.ndarray, np.ndarray]]


class Oracle:
    """``token_map``: Engram's compressed ids; by default those of the golden checkpoint.

    margin: of the last call, the smallest distance between a score that was selected and one that
    was not (entries, blocks, experts). Other arithmetic may select otherwise where it is tiny.
    """

    def __init__(self, directory: Path | str = GOLDENS / "tiny_ckpt", token_map=None):
        directory = Path(directory)
        text = json.loads((directory / "config.json").read_text())["text_config"]
        self.cfg = SimpleNamespace(**text)
        self.w = load_tensors(directory)
        if token_map is None:
            token_map = json.loads((GOLDENS / "engram_constants.json").read_text())["token_map"]
        self.token_map = np.asarray(token_map, np.int64)
        self.cut = max(self.cfg.kv_source_layer_ids)
        self.margin = np.inf

    def logits(
        self, ids: Sequence[int], length: int, *, hits: Sequence[int] = (), replay: bool = True
    ) -> np.ndarray:
        """float64 [len(ids) - length + 1, V]: after the last of ``length`` prompt tokens and after
        each later token.

        hits: lengths of the cached prefixes, ascending, each adopted by the turn that wrote the
        rows up to the next one; the last one is this prompt's. replay: decoder layers on the last
        window of the prompt only.
        """
        ids, stored, window = np.asarray(ids), {}, self.cfg.sliding_window
        self.margin = np.inf
        for hit, following in zip((0, *hits), (*hits, len(ids)), strict=True):
            assert hit == 0 or (hit > window and hit % 2 == 0)
            start = hit - window if hit else 0
            stream, stored = self._encode(ids[:following], start, hit, stored)
        assert replay or not hits
        stream = stream.since(max(length - window, 0) if replay else 0)
        for layer in range(self.cut + 1, self.cfg.num_hidden_layers):
            self._layer(layer, stream, ids, 0, stored)
        x = np.einsum("ts,tsd->td", stream.pre, stream.h)[stream.position >= length - 1]
        return norm(x, self.w["norm.weight"]) @ self.w["head.weight"].T

    def greedy(self, prompt: Sequence[int], steps: int, **replay) -> tuple[list[int], np.ndarray]:
        """``steps`` tokens, and the logits [steps, V] they are taken from."""
        ids = list(prompt)
        for _ in range(steps):
            rows = self.logits(ids, len(prompt), **replay)
            ids.append(int(rows[-1].argmax()))
        return ids[len(prompt) :], rows

    def _encode(
        self, ids: np.ndarray, start: int, hit: int, stored: Stored
    ) -> tuple[Stream, Stored]:
        """Rows start .. of ``ids`` through the layers up to the last KV source; all global rows,
        those below ``hit`` as stored.
        """
        embedded = self.w["embed.weight"][ids[start:]]
        h = np.repeat(embedded[:, None], self.cfg.hc_mult, axis=1)
        pre = np.zeros(h.shape[:2])
        pre[:, 0] = 1
        stream = Stream(h, pre, np.arange(start, len(ids)), start)
        stored = dict(stored)
        for layer in range(self.cut + 1):
            self._layer(layer, stream, ids, hit, stored)
        return stream, stored

    def _layer(self, layer: int, s: Stream, ids: np.ndarray, hit: int, stored: Stored) -> None:
        name = f"layers.{layer}."
        if layer in self.cfg.engram_layer_ids:
            s.h = self._engram(layer, s.h, ids, s.position)
        pre, post, comb = self._mixes(name + "hc_attn_", s.h)
        x = norm(np.einsum("ts,tsd->td", s.pre, s.h), self.w[name + "attn_norm.weight"])
        s.h = mixed(s.h, post, comb, self._attention(layer, x, s, hit, stored))
        s.pre, post, comb = self._mixes(name + "hc_ffn_", s.h)
        # The mixture of experts collapses with the mix that attention handed down.
        x = norm(np.einsum("ts,tsd->td", pre, s.h), self.w[name + "ffn_norm.weight"])
        s.h = mixed(s.h, post, comb, self._experts(name + "ffn.", x))

    def _mixes(self, name: str, h: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """pre, post [T, S] and comb [T, S, S] of a sublayer (section 7)."""
        eps, n, flat = self.cfg.hc_eps, self.cfg.hc_mult, h.reshape(len(h), -1)
        m = flat @ self.w[name + "fn"].T / np.sqrt((flat**2).mean(-1, keepdims=True) + EPS)
        scale, base = self.w[name + "scale"], self.w[name + "base"]
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        c = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        c = np.exp(c - c.max(-1, keepdims=True))
        c = c / c.sum(-1, keepdims=True) + eps
        c = c / (c.sum(-2, keepdims=True) + eps)
        for _ in range(self.cfg.hc_sinkhorn_iters - 1):
            c = c / (c.sum(-1, keepdims=True) + eps)
            c = c / (c.sum(-2, keepdims=True) + eps)
        return pre, post, c

    def _attention(
        self, layer: int, x: np.ndarray, s: Stream, hit: int, stored: Stored
    ) -> np.ndarray:
        cfg, name = self.cfg, f"layers.{layer}.attn."
        ratio, heads, dim = cfg.compress_ratios[layer], cfg.num_attention_heads, cfg.head_dim
        qr = norm(self._linear(name + "wq_a", x), self.w[name + "q_norm.weight"])
        q = self._linear(name + "wq_b", qr).reshape(-1, heads, dim)
        q = self._rotated(q, s.position[:, None], ratio)
        kv = norm(self._linear(name + "wkv", x), self.w[name + "kv_norm.weight"])
        kv = self._rotated(kv, s.position, ratio)
        back = s.position[:, None] - s.position
        seen = (back >= 0) & (back < cfg.sliding_window) & (s.position >= s.floor)
        if ratio:
            owner = max(source for source in cfg.kv_source_layer_ids if source <= layer)
            if layer == owner:
                stored[layer] = self._compressed(name, x, s.position, ratio, hit, stored, layer)
            if layer in cfg.index_source_layer_ids:
                self._select(layer, x, qr, s, stored[owner][1], ratio)
            kv, seen = np.concatenate([kv, stored[owner][0]]), np.hstack([seen, s.picked])
        score = np.einsum("thd,kd->htk", q, kv) * dim**-0.5
        score = np.where(seen, score, -np.inf)
        top = score.max(-1, keepdims=True)
        weight = np.exp(score - top)
        sink = np.exp(self.w[name + "attn_sink"][:, None, None] - top)
        out = np.einsum("htk,kd->thd", weight / (weight.sum(-1, keepdims=True) + sink), kv)
        out = self._rotated(out, -s.position[:, None], ratio)
        groups = out.reshape(len(x), cfg.o_groups, -1)
        wo_a = self.w[name + "wo_a.weight"].reshape(cfg.o_groups, cfg.o_lora_rank, -1)
        z = np.einsum("tgi,goi->tgo", groups, wo_a)
        return self._linear(name + "wo_b", z.reshape(len(x), -1))

    def _compressed(self, name, x, position, ratio, hit, stored, layer):
        """Latents and index keys of every entry: stored ones below ``hit``, new ones from x."""
        x = x[position >= hit]
        latent = self._linear(name + "compressor.wkv", x)
        if ratio == 2:
            whole = len(x) // 2 * 2
            u = latent[:whole].reshape(-1, 2, latent.shape[-1])
            g = self._linear(name + "compressor.wgate", x[:whole]).reshape(u.shape)
            w = np.exp(g - g.max(1, keepdims=True))
            latent = (w / w.sum(1, keepdims=True) * u).sum(1)
        latent = norm(latent, self.w[name + "compressor.norm.weight"])
        place = hit + ratio * np.arange(len(latent))
        key = norm(
            self._linear(name + "indexer.wk", latent), self.w[name + "indexer.k_norm.weight"]
        )
        new = self._rotated(latent, place, ratio), self._rotated(key, place, ratio)
        if not hit:
            return new
        old = [array[: hit // ratio] for array in stored[layer]]
        return tuple(np.concatenate(pair) for pair in zip(old, new, strict=True))

    def _select(self, layer, x, qr, s: Stream, keys: np.ndarray, ratio: int) -> None:
        """Fill ``s.picked``, and at the candidate source ``s.allowed`` (section 6)."""
        cfg, name = self.cfg, f"layers.{layer}.attn.indexer."
        q = self._linear(name + "wq_b", qr).reshape(len(x), cfg.index_n_heads, -1)
        q = self._rotated(q, s.position[:, None], ratio)
        w = self._linear(name + "weights_proj", x)
        w = w * (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
        score = np.einsum("thj,th->tj", np.maximum(np.einsum("thd,jd->thj", q, keys), 0), w)
        visible = np.arange(len(keys)) < ((s.position + 1) // ratio)[:, None]
        score = np.where(visible, score, -np.inf)
        if layer == cfg.candidate_source_layer_id:
            s.allowed = self._candidates(score, (s.position + 1) // ratio)
        elif layer > cfg.candidate_source_layer_id:
            score = np.where(s.allowed, score, -np.inf)
        s.picked = self._best(score, cfg.index_topk)

    def _candidates(self, score: np.ndarray, visible: np.ndarray) -> np.ndarray:
        size = self.cfg.candidate_block_size
        padded = np.pad(score, ((0, 0), (0, -score.shape[1] % size)), constant_values=-np.inf)
        blocks = padded.reshape(len(score), -1, size).max(-1)
        newest = (visible - 1) // size
        blocks[np.arange(len(score)), newest] = np.where(newest >= 0, np.inf, -np.inf)
        kept = self._best(blocks, self.cfg.candidate_topk_blocks)
        return np.repeat(kept, size, axis=1)[:, : score.shape[1]]

    def _experts(self, name: str, x: np.ndarray) -> np.ndarray:
        cfg = self.cfg
        scores = np.sqrt(np.logaddexp(0, self._linear(name + "gate", x)))
        chosen = self._best(scores + self.w[name + "gate.bias"], cfg.num_experts_per_tok)
        weight = np.where(chosen, scores, 0)
        weight = weight / (weight.sum(-1, keepdims=True) + EPS) * cfg.routed_scaling_factor
        y = self._expert(name + "shared_experts.", x, 1)
        for e in range(cfg.n_routed_experts):
            y += self._expert(f"{name}experts.{e}.", x, weight[:, e, None])
        return y

    def _expert(self, name: str, x: np.ndarray, weight) -> np.ndarray:
        limit = self.cfg.swiglu_limit
        gate = np.minimum(self._linear(name + "w1", x), limit)
        up = np.clip(self._linear(name + "w3", x), -limit, limit)
        return self._linear(name + "w2", weight * gate * sigmoid(gate) * up)

    def _engram(self, layer: int, h: np.ndarray, ids: np.ndarray, position) -> np.ndarray:
        name, streams, hidden = f"layers.{layer}.engram.", *h.shape[1:]
        rows = self.w[name + "embed.weight"][self.engram_rows(layer, ids)[position]]
        kv = self._linear(name + "wkv", rows.reshape(len(h), -1))
        keys, value = kv[:, : streams * hidden].reshape(h.shape), kv[:, streams * hidden :]
        a, b = (v / np.sqrt((v**2).mean(-1, keepdims=True) + EPS) for v in (h, keys))
        weight = self.w[name + "q_weight"] * self.w[name + "k_weight"]
        dot = (a * weight * b).sum(-1) * hidden**-0.5
        gate = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6)))
        return h + gate[..., None] * value[:, None]

    def engram_rows(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """Table rows [len(ids), columns] of every position (section 9.3)."""
        cfg = self.cfg
        pad = self.token_map[cfg.engram_pad_token_id]
        most = max(1, (2**63 - 1) // cfg.engram_compressed_vocab_size // 2)
        draws = np.random.default_rng(10007 * layer).integers(0, most, cfg.engram_max_ngram_size)
        primes = self._primes[cfg.engram_layer_ids.index(layer)]
        mixed, columns, offset = 0, [], 0
        for back, multiplier in enumerate(2 * draws + 1):
            shifted = np.concatenate([np.full(back, pad), self.token_map[ids]])[: len(ids)]
            mixed = mixed ^ (shifted * multiplier)
            for prime in primes[back - 1] if back else ():
                columns.append(mixed % prime + offset)
                offset += prime
        return np.stack(columns, axis=1)

    @cached_property
    def _primes(self) -> np.ndarray:
        """[Engram layer, n-gram size, head]."""
        cfg = self.cfg
        shape = len(cfg.engram_layer_ids), cfg.engram_max_ngram_size - 1, cfg.engram_n_heads
        found, number = [], cfg.engram_vocab_size
        while len(found) < np.prod(shape):
            if all(number % d for d in range(2, int(number**0.5) + 1)):
                found.append(number)
            number += 1
        return np.array(found).reshape(shape)

    def _best(self, score: np.ndarray, count: int) -> np.ndarray:
        """Which of each row's entries are its ``count`` largest finite or +inf ones, the lowest
        index among equals.
        """
        chosen = np.zeros(score.shape, bool)
        order = np.argsort(-score, axis=-1, kind="stable")[:, :count]
        np.put_along_axis(chosen, order, True, axis=-1)
        chosen &= score > -np.inf
        least = np.where(chosen, score, np.inf).min(-1, initial=np.inf)
        most = np.where(chosen, -np.inf, score).max(-1, initial=-np.inf)
        self.margin = min(self.margin, (least - most).min())
        return chosen

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[name + ".weight"].T

    def _rotated(self, x: np.ndarray, position: np.ndarray, ratio: int) -> np.ndarray:
        """x [..., d] with its last dimensions turned by the angles of ``position`` (4.1)."""
        dims = self.cfg.qk_rope_head_dim
        angle = np.asarray(position)[..., None] * self._frequencies(ratio)
        turned = (x[..., -dims::2] + 1j * x[..., 1 - dims :: 2]) * np.exp(1j * angle)
        out = x.copy()
        out[..., -dims::2], out[..., 1 - dims :: 2] = turned.real, turned.imag
        return out

    def _frequencies(self, ratio: int) -> np.ndarray:
        cfg, dims = self.cfg, self.cfg.qk_rope_head_dim
        theta = cfg.compress_rope_theta if ratio else cfg.rope_theta
        f = 1.0 / theta ** (np.arange(0, dims, 2) / dims)
        if not ratio:
            return f
        yarn = SimpleNamespace(**cfg.rope_scaling)

        def turns(count: float) -> float:
            spread = yarn.original_max_position_embeddings / (2 * np.pi * count)
            return dims * np.log(spread) / (2 * np.log(theta))

        low = max(np.floor(turns(yarn.beta_fast)), 0)
        high = min(np.ceil(turns(yarn.beta_slow)), dims - 1)
        ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        return f / yarn.factor * ramp + f * (1 - ramp)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def mixed(h: np.ndarray, post: np.ndarray, comb: np.ndarray, y: np.ndarray) -> np.ndarray:
    return post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", comb, h)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
