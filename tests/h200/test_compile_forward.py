"""``serving.bench forward``: the decode step at full width compiles for an H200 from shapes alone,
with weight sets that layers share.

Spills are those of our own kernels: ptxas reports nothing of XLA's.
"""

import re
from pathlib import Path

import jax
import pytest

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import COMPILER_OPTIONS
from dsv41_jax.config import Config
from pallas_kernels import dispatch
from pallas_kernels.numerics import SERVING
from serving.bench.forward_cases import PAGE
from serving.bench.forward_launches import kernels, launches
from serving.bench.forward_model import measured_model
from serving.bench.forward_programs import WITHOUT_COMMAND_BUFFERS, SharedPrograms
from serving.bench.forward_routing import new_tables
from serving.bench.forward_weights import WeightSets
from serving.programs import Bucket
from sharding.build import build_ops
from sharding.place import place
from tools.h200_compile import h200_mesh

pytestmark = pytest.mark.h200

MOST_LAUNCHES = 13  # a layer, on average
HLO_NAMES = {"int32": "s32", "uint8": "u8", "float32": "f32", "bfloat16": "bf16"}
BATCH, CONTEXT = 1, 8192
_INDENT = 4  # of what a command buffer holds, in XLA's list of thunks


@pytest.fixture
def decode(monkeypatch, tmp_path: Path):
    """(layers, sets, options) -> programs and the compiled step; dumps lie in ``tmp_path``."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def compiled(layers: str, sets: int, **options):
        cfg = measured_model(Config.preset("flash"), layers, 1_000_000)
        placement = place("tp1", cfg, list(h200_mesh(1).devices.flat))
        structure = WeightSets(cfg, SERVING, placement, sets, packed=True, draft=False)
        tables = new_tables(cfg, "random", sets, draft=False)
        pages = CONTEXT // PAGE
        shape = CacheShape(BATCH, BATCH * pages, PAGE)
        programs = SharedPrograms(structure, build_ops("tp1", SERVING), shape, tables)
        traced = programs.traced("decode", Bucket(BATCH, 1, pages))
        lowered = traced.lower(lowering_platforms=("cuda",))
        dump = {"xla_dump_to": str(tmp_path)}
        return programs, lowered.compile({**COMPILER_OPTIONS, **dump, **options})

    return compiled


def thunks(folder: Path) -> tuple[list[str], list[str]]:
    """Kinds of the outermost thunks, and of those that launch something, in a command buffer or
    not; a conditional counts once.
    """
    found = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt"))
    found = found or sorted(folder.glob("*thunk_sequence.txt"))
    outermost, launched = [], []
    for line in found[-1].read_text().splitlines():
        match = re.match(r"( *)\d+: (k\w+)", line)
        if match is None:
            continue
        indent, name = len(match[1]), match[2]
        if indent == 0:
            outermost.append(name)
        recorded = indent == _INDENT and outermost[-1] == "kCommandBuffer"
        if recorded or (indent == 0 and name != "kCommandBuffer"):
            launched.append(name)
    return outermost, launched


def test_the_decode_step(decode, tmp_path):
    """All 40 layers: caches updated in place, no spills, one command buffer for all of it."""
    sets = 12
    programs, compiled = decode("all", sets)
    leaves = jax.tree.leaves(programs.cache_shapes())
    memory, text = compiled.memory_analysis(), compiled.as_text()
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert memory.alias_size_in_bytes == held
    shapes = {
        f"{HLO_NAMES[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"
        for leaf in leaves
        if leaf.size * leaf.dtype.itemsize > 16_384
    }
    copies = [line for line in text.splitlines() if " copy(" in line]
    assert [line for line in copies if any(shape in line for shape in shapes)] == []
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for report in reports for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), reports
    count = programs.cfg.num_hidden_layers
    outermost, launched = thunks(tmp_path)
    print(
        f"{count} layers, {sets} weight sets: {len(launched)} launches,"
        f" {len(launched) / count:.1f} a layer ({launches(text)} in the HLO),"
        f" kernels {kernels(text)}, {len(set(map(str, reports)))} reports of ptxas;"
        f" arguments {memory.argument_size_in_bytes / 1e9:.1f} GB,"
        f" temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB"
    )
    assert outermost == ["kCommandBuffer"]
    assert len(launched) <= MOST_LAUNCHES * count
    assert memory.temp_size_in_bytes < 1e9
    found = kernels(text)
    # Queries of all heads beside the stores; both halves of the output projection.
    once = (
        "moe_gate_few_rows",
        "moe_experts_arrange",
        "moe_experts_decode",
        "sparse_attention",
        "linear_few_rows_and_store",
        "output_projection",
    )
    assert {name: found[name] for name in once} == dict.fromkeys(once, count)
    # Low-rank queries and window rows; Engram's twice.
    assert found["linear_few_rows"] == count + 2
    assert found["mhc_site"] == 2 * count and "mhc_coefficients" not in found
    assert found["engram_gate_add"] == 2


def test_command_buffers_off(decode, tmp_path):
    """What ``forward`` compiles for its configuration without command buffers."""
    decode("20,21", 1, **WITHOUT_COMMAND_BUFFERS)
    outermost, launched = thunks(tmp_path)
    assert outermost == launched
    assert len(launched) > 50
