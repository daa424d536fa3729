"""What compress-and-store reads and writes (ARCHITECTURE 4.3, 4.7, sections 5 and 6.1)."""

from dataclasses import dataclass, field

import jax
from jax import Array

from pallas_kernels.quant.storage import StoredRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """start int32 [B]: position, at least 0, of row 0 of each request. length int32 [B]: live rows,
    the first ones.
    """

    start: Array
    length: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Ratio 2: projections u and gates g f32 [B, T, K] of a chunk, ``before_*`` [B, K] of the row
    before it (any value if a chunk starts at an even position).
    """

    u: Array
    g: Array
    before_u: Array
    before_g: Array

    @property
    def ratio(self) -> int:
        return 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projected:
    """Ratio 1: projections [B, T, K] in the model's dtype."""

    x: Array

    @property
    def ratio(self) -> int:
        return 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """Where entries go. page_table int32 [B, P], write_from int32 [B]: groups that close at a lower
    position are not stored. A group whose page is outside the pool, or whose entry is outside the
    table, is not stored either.
    """

    page_table: Array
    write_from: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latents:
    """G = T groups a request, ceil(T / 2) at ratio 2, those that close in the chunk first. weight
    [K] in the model's dtype; cos, sin f32 [B, G, 32] of each group's first position; pool [pages,
    E].
    """

    source: Pairs | Projected
    weight: Array
    cos: Array
    sin: Array
    pool: StoredRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """Projections x [B, G, Ki] of the latents, weight [Ki]; cos, sin f32 [B, G, 32];
    places: T of the chunk; pool [pages, E].
    """

    x: Array
    weight: Array
    cos: Array
    sin: Array
    pool: StoredRows
    places: int = field(metadata={"static": True})
    ratio: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """Projections x [B, T, K], weight [K]; cos, sin f32 [B, T, 32]; rings [S, size] with
    their positions, tags int32 [S, size]; slot int32 [B] the ring of each request. A ring keeps the
    last ``size`` rows of a chunk; ``emit``: the result has all of them too.
    """

    x: Array
    weight: Array
    cos: Array
    sin: Array
    ring: StoredRows
    tags: Array
    slot: Array
    emit: bool = field(default=False, metadata={"static": True})
