"""A host machine whose kernels copy by tensor maps."""

from dataclasses import dataclass

import numpy as np

from tests.pallas_kernels.test_linear_broad import Ring

FIRST = 1 << 40  # the address of the first map, which is no memory


@dataclass(frozen=True)
class Map:
    """Of bytes ``shape`` at ``at``: ``box`` rows and columns a copy, chunks of 16 bytes exchanged
    in lines of ``swizzle``.
    """

    at: int
    shape: tuple[int, int]
    box: tuple[int, int]
    swizzle: int

    def __post_init__(self) -> None:
        assert self.at % 16 == self.shape[1] % 16 == 0
        assert self.swizzle == 128 == self.box[1] and self.box[0] <= 256


class Mapped(Ring):
    """``maps``: those that the operands from ``FIRST`` on are."""

    def __init__(self, *args, maps: list[Map], **options):
        super().__init__(*args, **options)
        self.maps = maps

    def execute(self, b, opcode, args, active) -> None:
        if not opcode.startswith("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier"):
            super().execute(b, opcode, args, active)
            return
        desc, place = args[1].strip("[]").split(",", 1)
        column, row = (b.read(name.strip()) for name in place.strip(" {}").split(","))
        to, bar = self.at(b, args[0]), self.at(b, args[2])
        for lane in np.flatnonzero(active):
            one = self.maps[int(b.read(desc.strip())[lane]) - FIRST]
            at = int(to[lane])
            assert at % 1024 == 0 and at + one.box[0] * one.box[1] <= b.shared.data.size
            values = self.values(one, int(row[lane]), int(column[lane]))
            b.shared.data[at : at + values.size] = values.reshape(-1)
            self.landed(b, int(bar[lane]), values.size)

    def values(self, one: Map, row: int, column: int) -> np.ndarray:
        """A box as it lies in shared memory; zeros for what is outside."""
        (rows, columns), (height, width) = one.shape, one.box
        whole = self.memory.data[one.at : one.at + rows * columns].reshape(rows, columns)
        box = np.zeros(one.box, np.uint8)
        part = whole[row : row + height, column : column + width]
        box[: part.shape[0], : part.shape[1]] = part
        chunks = box.reshape(height, width // 16, 16)
        out = np.empty_like(chunks)
        line, chunk = np.ogrid[:height, : width // 16]
        out[line, chunk ^ line % 8] = chunks
        return out

    def landed(self, b, bar: int, size: int) -> None:
        self.barriers[b.rank, bar].arrive(0, -size)
