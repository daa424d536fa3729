"""The rows of one forward: consecutive positions of several requests."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """B requests of T row places each; a request's live rows come first.

    tokens int32 [B, T]; image bool [B, T]: rows of an image span. start int32 [B]: position of row
    0. length int32 [B]: live rows. slot int32 [B]: private state of the request. page_table int32
    [B, P], -1 where no page is assigned. floor, decoder_floor int32 [B]: lowest window position
    that layers up to and after the last KV source may see (ARCHITECTURE section 17, decisions 5 and
    6). write_from int32 [B]: rows below it store no global entry. previous int32 [B, n-1]: token
    ids before row 0, oldest first, -1 for none or for an image.
    """

    tokens: Array
    image: Array
    start: Array
    length: Array
    slot: Array
    page_table: Array
    floor: Array
    decoder_floor: Array
    write_from: Array
    previous: Array

    @property
    def position(self) -> Array:
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def live(self) -> Array:
        return jnp.arange(self.tokens.shape[1]) < self.length[:, None]
