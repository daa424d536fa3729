"""Choice of an implementation, and the numeric modes by name."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import pallas_kernels
from dsv41_jax.ops import local_ops
from pallas_kernels import dispatch
from pallas_kernels.numerics import FLOAT32, MODES, REFERENCE, SERVING, Numerics

BOTH = {"reference": "ref", "mosaic": "kernel"}
FOLDERS = sorted(path.parent.name for path in Path(pallas_kernels.__path__[0]).glob("*/op.py"))


@pytest.mark.parametrize(("hopper", "chosen"), [(False, "ref"), (True, "kernel")])
def test_auto_is_the_kernel_on_hopper_alone(monkeypatch, hopper, chosen):
    monkeypatch.setattr(dispatch, "on_hopper", lambda: hopper)
    assert dispatch.choose("op", "auto", BOTH) == chosen
    assert dispatch.choose("op", "auto", {"reference": "ref"}) == "ref"
    assert dispatch.choose("op", "reference", BOTH) == "ref"


def test_a_kind_asked_for_by_name_never_falls_back(monkeypatch):
    monkeypatch.setattr(dispatch, "on_hopper", lambda: False)
    with pytest.raises(ValueError, match="op: the 'mosaic' kernel needs an sm_90 GPU"):
        dispatch.choose("op", "mosaic", BOTH)
    for kind in ("mosaic", "interpret"):
        with pytest.raises(ValueError, match=f"op has no '{kind}' kernel; it has reference"):
            dispatch.choose("op", kind, {"reference": "ref"})
    with pytest.raises(ValueError, match="'fast' must be one of auto, reference"):
        dispatch.choose("op", "fast", BOTH)


def test_a_cpu_is_no_hopper():
    assert dispatch.on_hopper() is False


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "whole"),
    [("9.0", 132, True), ("9.0", 114, False), ("8.0", 132, False), ("10.0", 148, False)],
)
def test_a_part_of_a_hopper_is_none(monkeypatch, capability, multiprocessors, whole):
    """Kernels whose blocks wait for one another would hang on it."""
    device = SimpleNamespace(
        platform="gpu", compute_capability=capability, core_count=multiprocessors
    )
    monkeypatch.setattr(dispatch.jax, "devices", lambda: [device])
    assert dispatch.on_hopper() is whole


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_op_names_its_cases_apart(folder):
    cases = importlib.import_module(f"pallas_kernels.{folder}.cases").CASES
    assert len({str(case) for case in cases}) == len(cases) > 0
    assert all("=" in part for case in cases for part in str(case).split(","))


def test_local_ops_bind_the_numerics():
    ops = local_ops(REFERENCE, "reference")
    assert ops.numerics is REFERENCE
    assert ops.linear(jnp.ones((1, 4)), jnp.ones((2, 4))).dtype == jnp.bfloat16


def test_modes():
    assert tuple(MODES.values()) == (FLOAT32, REFERENCE, SERVING)
    assert Numerics.named("serving") is SERVING
    with pytest.raises(ValueError, match="'fp32' must be one of float32, reference, serving"):
        Numerics.named("fp32")
    assert not FLOAT32.packed_weights and REFERENCE.packed_weights and SERVING.packed_weights
