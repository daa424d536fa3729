"""The pass between two sublayers with the coefficients of the second: its own PTX on a host machine
against the two kernels that it stands for.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.addends import Addends
from pallas_kernels.mhc import kernel_sm90, op, site_ptx
from pallas_kernels.mhc.cases import Case, checks
from pallas_kernels.mhc.fused_ptx import Fused
from pallas_kernels.mhc.site_ptx import Site
from tests.pallas_kernels import test_mhc_kernel as two
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_mhc import EPS, NORM_EPS
from tests.pallas_kernels.test_mhc_kernel import BF16, float_operations, prefetches

__all__ = ["float_operations", "prefetches"]  # fixtures, for every test here

OPTIONS = {"norm_eps": NORM_EPS, "iters": 20, "eps": EPS, "mix_eps": NORM_EPS}


def site(rows: int, width: int = 1024, parts: int = 0) -> Site:
    return Site(rows, width, parts, 20, EPS, NORM_EPS, NORM_EPS)


def inputs(rng, s: Site) -> tuple[list, list]:
    """Arrays of the site with its output in parts, and those of the two kernels."""
    arrays, mix = two.fused_inputs(rng, s.rows, s.width), two.mix_inputs(rng, 1, 4 * s.width)[1:]
    y = arrays[1]
    if s.parts:
        y = rng.standard_normal((s.parts, s.rows, s.width)).astype(np.float32)
        arrays[1] = np.asarray(Addends(jnp.asarray(y)).total(BF16))
    return [arrays[0], y, *arrays[2:], *mix], [*arrays, *mix]


def run(s: Site, arrays, machine=Cluster) -> list[np.ndarray]:
    memory = Guarded(1 << 22)
    at = [memory.place(np.asarray(a)) for a in arrays]
    mixed = ((s.rows, n, np.float32) for n in (4, 4, 16))
    outs = two.place_outputs(memory, (s.rows, 4 * s.width, BF16), (s.rows, s.width, BF16), *mixed)
    addresses, lines = [*at, *map(two.row_address, outs), 0], site_ptx.program(s)
    size = {"threads": s.threads, "shared": 4 * s.words, "blocks": site_ptx.BLOCKS}
    for row in range(s.rows):
        operands = partial(lambda row, rank: [*addresses, row, rank], row)
        machine(lines, memory, operands=operands, **size).run()
    return [two.read(memory, out) for out in outs]


@pytest.mark.parametrize("s", [site(2), site(1, 2048, 3)], ids=str)
def test_it_is_the_two_kernels(s, rng):
    arrays, both = inputs(rng, s)
    streams, normed, *mixed = run(s, arrays)
    want, want_normed = two.run_fused(Fused(s.rows, s.width, s.rows, NORM_EPS), both[:6])
    assert streams.tobytes() == want.tobytes()
    two.close_bf16(normed, want_normed.astype(np.float64))
    two.coefficients_close([want.reshape(s.rows, -1), *both[6:]], mixed)


def test_a_row_has_the_same_bits_in_any_batch_with_warps_in_any_order(rng):
    arrays, _ = inputs(rng, site(2))
    arrays[0][0] = np.nan
    whole = run(site(2), arrays)
    alone = [a[1:] for a in arrays[:5]] + arrays[5:]
    for got, want in zip(run(site(1), alone, partial(Strict, seed=1)), whole, strict=True):
        assert got.tobytes() == want[1:].tobytes()
        assert np.isnan(want[0].astype(np.float32)).all()


def test_what_it_refuses():
    h, y = jnp.zeros((2, 4, 1024), BF16), jnp.zeros((2, 1024), BF16)
    assert not kernel_sm90.site_unfit(h, y)
    assert not kernel_sm90.site_unfit(h, Addends(jnp.zeros((16, 2, 1024))))
    assert "1 to 7 rows" in kernel_sm90.site_unfit(jnp.zeros((8, 4, 1024), BF16), y)
    assert "columns" in kernel_sm90.site_unfit(jnp.zeros((2, 4, 1032), BF16), y)
    assert "P 1 to 24" in kernel_sm90.site_unfit(h, Addends(jnp.zeros((25, 2, 1024))))
    with pytest.raises(ValueError, match=r"mhc_site: h.shape=\(2, 4, 1000\)"):
        kernel_sm90.site(jnp.zeros((2, 4, 1000), BF16), y, *[None] * 7, **OPTIONS)
    with pytest.raises(ValueError, match=r"self.parts=25 must be 0 to 24"):
        site(1, parts=25)


def test_auto_takes_the_launch_for_few_rows_and_the_two_for_more(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "site", lambda *_, **__: "site")
    monkeypatch.setattr(kernel_sm90, "expand_collapse_norm", lambda *_, **__: ("h", "x"))
    monkeypatch.setattr(kernel_sm90, "coefficients", lambda *_, **__: "mixed")
    monkeypatch.setattr(op, "_coefficients_where_fit", lambda *_, **__: "mixed")

    def taken(kernels: str, rows: int, width: int = 1024):
        h, y, weight = (
            jnp.zeros(shape, BF16) for shape in ((rows, 4, width), (rows, width), width)
        )
        return op.build_site(kernels)(h, y, *[None] * 3, weight, *[None] * 3, **OPTIONS)

    for kernels in ("auto", "mosaic"):
        assert taken(kernels, 7) == "site"
        assert taken(kernels, 8) == taken(kernels, 1, 1032) == ("h", "x", "mixed")


def test_the_reference_takes_parts(rng):
    arrays, both = (tuple(map(jnp.asarray, each)) for each in inputs(rng, site(2, parts=3)))
    comb = arrays[3].reshape(2, 4, 4)
    reference = partial(op.build_expand_collapse_norm("reference"), norm_eps=NORM_EPS)
    got = reference(arrays[0], Addends(arrays[1]), arrays[2], comb, *arrays[4:6])
    want = reference(*both[:3], comb, *both[4:6])
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


def test_without_a_sublayer_before_it_the_streams_stay(rng, monkeypatch):
    """The kernel adds nothing to each stream; the reference is collapse, norm and coefficients."""
    seen = []

    def launcher(s):
        def run(*operands):
            seen.extend(operands)
            shapes = (s.rows, 4, s.width), (s.rows, s.width), (s.rows, 4), (s.rows, 4), (s.rows, 16)
            return tuple(map(jnp.zeros, shapes))

        return run

    monkeypatch.setattr(kernel_sm90, "site_launcher", launcher)
    arrays = tuple(map(jnp.asarray, inputs(rng, site(2))[1]))
    h, _, _, _, pre, *rest = arrays
    streams, _, _ = kernel_sm90.site(h, None, None, None, pre, *rest, **OPTIONS)
    assert streams is h and not seen[1].any() and not seen[2].any()
    assert (seen[3].reshape(2, 4, 4) == jnp.eye(4)).all()
    reference = op.build_expand_collapse_norm("reference")
    want = reference(h, *seen[1:3], seen[3].reshape(2, 4, 4), pre, rest[0], norm_eps=NORM_EPS)
    for name in ("_coefficients", "_coefficients_where_fit"):
        monkeypatch.setattr(op, name, lambda *_, **__: "mixed")
    few = jnp.zeros((8, 4, 1024), BF16).at[:2].set(h)
    more = jnp.zeros((8, 4)).at[:2].set(pre)
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    for kernels in ("auto", "mosaic"):
        run = op.build_site(kernels)
        got = run(few, None, None, None, more, *rest, **OPTIONS)
        assert got[0] is few and got[2] == "mixed"
        two.close_bf16(np.asarray(got[1][:2]), np.asarray(want[1], np.float64))


def test_checks_tell_right_from_wrong():
    case, right = Case(2, width=64, iters=2, part="site"), op.build_site("reference")
    assert all(check.ok for check in checks(case, 0, right))

    def wrong(h, *args, **options):
        streams, normed, mixed = right(jnp.flip(h, 0), *args, **options)
        return streams, normed, tuple(jnp.flip(a, 0) for a in mixed)

    assert not any(check.ok for check in checks(case, 0, wrong))
