"""Attention of whole sequences in blocks of products; selections are masks (ARCHITECTURE 4 to
6).
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dsv41_jax.attention import Attention
from dsv41_jax.ops import Ops
from dsv41_jax.rope import Angles, angles
from dsv41_jax.training.rounding import Rounding
from dsv41_jax.training.selection import candidate_mask, top_mask
from pallas_kernels.addends import Addends
from pallas_kernels.compress.ref import pool_pairs
from pallas_kernels.rotate import rotate

F32 = jnp.float32
QUERIES = 512  # rows whose scores exist at a time; later keys are left out of them
SELECTED = "selected"  # the masks that the backward pass does not compute again


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """What layers take from earlier ones. pools: latents [B, N, K] and index keys [B, N, Ki] by
    owner; scores f32 [B, T, N] of the last index source, -inf where it must not look; mask bool
    [B, T, N], its selection; candidates bool [B, T, N].
    """

    pools: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    scores: Array | None = None
    mask: Array | None = None
    candidates: Array | None = None


def attend(
    attn: Attention, ops: Ops, rounding: Rounding, x: Array, shared: Shared, dense: Array
) -> tuple[Array | Addends, Shared, Array]:
    """x [B, T, D] normed, T a multiple of the window -> y [B, T, D], what later layers share, and
    the index loss of this layer, float32 [].

    dense, bool []: every visible entry is attended to, whatever the index says. The index is
    trained towards the layer's own attention: the Kullback-Leibler divergence from the attention's
    weights on the entries of the mask, summed over heads and normalised, to the softmax of the
    scores there. Its inputs and its target are constants, so that only the index learns from it.
    """
    cfg, layer = attn.cfg, attn.layer
    position = jnp.arange(x.shape[1], dtype=jnp.int32)
    at = angles(cfg, layer.ratio, position)
    qr, q = attn.queries(ops, x)
    q = rotate(q, at.cos[:, None], at.sin[:, None])
    window = attn.kv_norm(ops.linear(x, attn.wkv()))
    window = rounding.window(rotate(window, at.cos, at.sin))
    sink, latents = attn.attn_sink.get_value(), None
    if layer.owns_kv:
        shared = _with_pool(attn, ops, rounding, x, shared)
    if layer.kv_source is not None:
        latents = shared.pools[layer.kv_source][0]
    if layer.selects:
        shared = _with_selection(attn, ops, rounding, x, qr, at, shared, dense)
    o, loss = _attention(q, window, latents, shared, sink, attn.window_size)
    o = rotate(o.astype(x.dtype), at.cos[:, None], at.sin[:, None], inverse=True)
    return attn.output(ops, o), shared, loss


def _with_pool(attn: Attention, ops: Ops, rounding: Rounding, x: Array, shared: Shared) -> Shared:
    """Latents and index keys of an owner, at the positions of their groups' first tokens."""
    compressor, indexer, ratio = attn.compressor, attn.indexer, attn.layer.ratio
    if ratio == 2:
        shape = (x.shape[0], x.shape[1] // 2, 2, -1)
        projected = (
            ops.linear(x, w(), out_dtype=F32).reshape(shape)
            for w in (compressor.wkv, compressor.wgate)
        )
        latent = pool_pairs(*projected).astype(x.dtype)
    else:
        latent = ops.linear(x, compressor.wkv())
    latent = compressor.norm(latent)
    position = ratio * jnp.arange(latent.shape[1], dtype=jnp.int32)
    at = angles(attn.cfg, ratio, position)
    keys = indexer.k_norm(ops.linear(jax.lax.stop_gradient(latent), indexer.wk()))
    pool = (
        rounding.latent(rotate(latent, at.cos, at.sin)),
        rounding.index(rotate(keys, at.cos, at.sin)),
    )
    return replace(shared, pools={**shared.pools, attn.layer.index: pool})


def _with_selection(
    attn: Attention,
    ops: Ops,
    rounding: Rounding,
    x: Array,
    qr: Array,
    at: Angles,
    shared: Shared,
    dense: Array,
) -> Shared:
    indexer, layer = attn.indexer, attn.layer
    fixed = jax.lax.stop_gradient((x, qr))
    q, weights = indexer.queries(ops, *fixed, at)
    keys = shared.pools[layer.kv_source][1]
    rows, entries = x.shape[1], keys.shape[1]
    visible = (jnp.arange(rows, dtype=jnp.int32) + 1) // layer.ratio
    seen = jnp.broadcast_to(jnp.arange(entries) < visible[:, None], (x.shape[0], rows, entries))
    scores = jnp.where(seen, index_scores(rounding.index(q), weights, keys), -jnp.inf)
    fixed_scores, candidates = jax.lax.stop_gradient(scores), shared.candidates
    if layer.candidate_source:
        counts = jnp.broadcast_to(visible, seen.shape[:2])
        candidates = checkpoint_name(
            candidate_mask(
                fixed_scores, counts, block_size=indexer.block_size, k=indexer.blocks
            ),
            SELECTED,
        )  # fmt: skip
    if layer.restricted:
        fixed_scores = jnp.where(candidates, fixed_scores, -jnp.inf)
    picked = top_mask(fixed_scores, indexer.top_k) & (fixed_scores > -jnp.inf)
    mask = checkpoint_name(jnp.where(dense, seen, picked), SELECTED)
    return replace(shared, scores=scores, mask=mask, candidates=candidates)


def index_scores(q: Array, weights: Array, keys: Array) -> Array:
    """float32 [B, T, N] from q [B, T, H, K], weights [B, T, H] and keys [B, N, K] (6.4)."""
    dots = _product("bthk,bnk->bthn", q, keys)
    return jnp.sum(jax.nn.relu(dots) * weights.astype(F32)[..., None], axis=2)


def _attention(
    q: Array, window: Array, latents: Array | None, shared: Shared, sink: Array, size: int
) -> tuple[Array, Array]:
    """float32 [B, T, H, K] and the index loss."""
    batch, rows = q.shape[:2]
    blocks = window.reshape(batch, rows // size, size, -1)
    before = jnp.pad(blocks[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    near = jnp.concatenate([before, blocks], axis=2)
    step = max(size, QUERIES // size * size)
    outputs, loss = [], jnp.zeros((), F32)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        here = near[:, first // size : (first + step) // size]
        if latents is None:
            outputs.append(_rows(q[:, part], here, None, None, sink, first)[0])
            continue
        assert shared.mask is not None and shared.scores is not None
        end = -(-min(first + step, rows) * latents.shape[1] // rows)
        mask = shared.mask[:, part, :end]
        output, weights = _rows(q[:, part], here, latents[:, :end], mask, sink, first)
        outputs.append(output)
        loss += _divergence(jax.lax.stop_gradient(weights), shared.scores[:, part, :end], mask)
    return jnp.concatenate(outputs, axis=1), loss / (batch * rows)


def _rows(
    q: Array,
    near: Array,
    latents: Array | None,
    mask: Array | None,
    sink: Array,
    first: int,
) -> tuple[Array, Array]:
    """Rows q [B, C, H, K] from position ``first`` on over their window blocks near [B, C/W, 2W, K]
    and latents [B, N, K]: outputs f32 [B, C, H, K], and the weights on latents f32 [B, C, N].
    """
    batch, count, heads, width = q.shape
    blocks, size = near.shape[1], near.shape[2] // 2
    scale = width**-0.5
    back = jnp.arange(size)[:, None] - jnp.arange(-size, size)
    inside = (back >= 0) & (back < size)
    known = first + size * jnp.arange(blocks)[:, None] + jnp.arange(-size, size) >= 0
    inside = inside[None, :, None] & known[:, None, None]
    split = q.reshape(batch, blocks, size, heads, width)
    near_scores = scale * _product("bcqhk,bclk->bcqhl", split, near)
    near_scores = jnp.where(inside, near_scores, -jnp.inf)
    near_scores = near_scores.reshape(batch, count, heads, 2 * size)
    top = jnp.maximum(jnp.max(near_scores, axis=-1), sink)
    if latents is not None:
        assert mask is not None
        far_scores = scale * _product("bthk,bnk->bthn", q, latents)
        far_scores = jnp.where(mask[:, :, None], far_scores, -jnp.inf)
        top = jnp.maximum(top, jnp.max(far_scores, axis=-1))
    top = jax.lax.stop_gradient(top)
    p = jnp.exp(near_scores - top[..., None])
    total = jnp.sum(p, axis=-1) + jnp.exp(sink - top)
    shape = (batch, blocks, size, heads, 2 * size)
    out = _product("bcqhl,bclk->bcqhk", p.reshape(shape).astype(q.dtype), near).reshape(q.shape)
    if latents is None:
        return out / total[..., None], jnp.zeros((batch, count, 0), F32)
    far = jnp.exp(far_scores - top[..., None])
    total += jnp.sum(far, axis=-1)
    out += _product("bthn,bnk->bthk", far.astype(q.dtype), latents)
    return out / total[..., None], jnp.sum(far / total[..., None], axis=2)


def _divergence(weights: Array, scores: Array, mask: Array) -> Array:
    """Sum over rows of KL(weights / sum || softmax(scores)) over the entries of the mask."""
    target = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    logits = jnp.where(mask, scores, -jnp.inf)
    some = jnp.any(mask, axis=-1, keepdims=True)
    log_q = jax.nn.log_softmax(jnp.where(some, logits, 0.0), axis=-1)
    log_p = jnp.log(jnp.maximum(target, 1e-20))
    terms = target * (log_p - jnp.where(mask, log_q, 0.0))
    return jnp.sum(jnp.where(mask, terms, 0.0))


def _product(formula: str, a: Array, b: Array) -> Array:
    """float32 out; products of float32 are exact to float32."""
    precision = "highest" if a.dtype == F32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=F32)
