"""The cases of a run, measured layout by layout, and their rows."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import jax

from dsv41_jax.command import progress_line
from dsv41_jax.config import Config
from pallas_kernels.numerics import Numerics
from serving.bench.forward_cases import Case, cache_shape
from serving.bench.forward_engram import (
    HBM,
    LATE,
    Fetching,
    host_tables,
    reads_tables,
    table_bytes,
    without_tables,
)
from serving.bench.forward_floor import Floors
from serving.bench.forward_flops import PROMPTS, matmul_tflops, share_pct, tflop
from serving.bench.forward_layout import LayoutBench, check_sums
from serving.bench.forward_measure import Bench
from serving.bench.forward_report import Row, case_line, named, read_rows, row_of, write_rows
from serving.bench.forward_routing import new_tables
from serving.bench.forward_weights import Weights, WeightSets, nbytes, random_sets, weight_sets
from serving.speculative import Speculation
from sharding.hardware import hardware
from sharding.place import REPLICATED, Placement, place

_WAVE = 8  # executables; those of a prompt in all its configurations are five


@dataclass
class Plan:
    """What to measure. notes: what a reader of the figures has to know. profiles: of the cases,
    if a file for them is given. matmul: 10^12 operations a second of bf16 products on a device,
    once they have been timed.
    """

    cfg: Config
    cases: list[Case]
    placements: list[Placement]
    weight_sets: int
    numerics: Numerics
    kernels: str
    all_reduce: str
    routings: list[str]
    engrams: list[str]
    machine: str
    chunk: int
    jobs: int
    layer_times: bool
    json: str | None
    profile: str | None
    notes: list[str]
    profiles: list[Row] = field(default_factory=list)
    matmul: float | None = None

    def measured(self) -> list[Row]:
        """Rows of all cases, those of an earlier run first."""
        rows = read_rows(self.json)
        for placement in self.placements:
            weights: Weights = {}
            # Tables on the host are for programs of their own.
            for host in (False, True):
                modes = [mode for mode in self.engrams if (mode != HBM) is host]
                left = [case for case in self.cases if self._left(rows, placement, modes, case)]
                if left:
                    weights = self._measure(placement, modes, left, rows, weights)
        return rows

    def _left(
        self, rows: list[Row], placement: Placement, modes: list[str], case: Case
    ) -> list[tuple[str, str]]:
        """The routings and places of Engram tables for which no row has this case."""
        name = placement.division.layout.name
        places = modes if reads_tables(case) else [mode for mode in modes if mode == HBM]
        done = [
            (row["routing"], row["engram"])
            for row in rows
            if (row["layout"], row["case"]) == (name, case.key)
        ]
        return [one for one in product(self.routings, places) if one not in done]

    def _measure(
        self,
        placement: Placement,
        modes: list[str],
        cases: list[Case],
        rows: list[Row],
        weights: Weights,
    ) -> Weights:
        """Adds the rows of cases. weights: of the layout, as the call before this one gave them;
        they are used up.
        """
        if self.matmul is None and any(case.phase in PROMPTS for case in cases):
            self.matmul = matmul_tflops()  # before the memory is full
            progress_line(f"bf16 products run at {self.matmul:.4g} TFLOP/s")
        cfg, on_host = self.cfg, HBM not in modes
        if on_host:
            cfg = without_tables(cfg)
            placement = place(placement.division.layout.name, cfg)
        count, draft = min(self.weight_sets, cfg.num_hidden_layers), drafting(cases)
        began = time.perf_counter()
        sets = weight_sets(cfg, self.numerics, placement, count, self.kernels, draft=draft)
        weights = jax.block_until_ready(random_sets(sets, self.kernels, weights))
        with ExitStack() as stack:
            host = stack.enter_context(host_tables(self.cfg)) if on_host else None
            load_s = time.perf_counter() - began
            self._note_weights(sets, nbytes(weights), load_s, on_host)
            runs = []
            for routing in self.routings:
                tables = new_tables(cfg, routing, count, draft=draft)
                params = {"weights": weights, "routing": placement.put(tables, REPLICATED)}
                runs.append((params, Floors(sets, hardware(self.machine), routing)))
            bench_of = LayoutBench(sets, self.kernels, self.all_reduce, host)
            single = self._single_layers(bench_of)
            for drafts in (False, True):
                ours = [case for case in cases if drafting([case]) is drafts]
                if not ours:
                    continue
                speculation = Speculation() if drafts else None
                programs = bench_of.programs(cache_shape(ours), tables, speculation)
                (params, floors), traces = runs[0], self.profile is not None
                bench = Bench(programs, params, floors, self.chunk, single, traces)
                if host:
                    bench.fetching = Fetching.of(host, programs)
                    stack.callback(bench.fetching.close)
                self._run_all(bench, bench_of, ours, runs, modes, rows, load_s)
        return weights

    def _single_layers(self, bench_of: LayoutBench) -> bool:
        """Whether single layers are timed in a layout. One by itself has no memory for peer-to-peer
        sums, and takes no rows.
        """
        why = "peer-to-peer sums" if bench_of.peers else "Engram rows from the host"
        if self.layer_times and (bench_of.peers or bench_of.host):
            self.notes.append(f"{bench_of.name}: no single layers beside {why}")
            return False
        return self.layer_times

    def _run_all(
        self,
        bench: Bench,
        bench_of: LayoutBench,
        cases: list[Case],
        runs: list[tuple[Any, Floors]],
        modes: list[str],
        rows: list[Row],
        load_s: float,
    ) -> None:
        for wave in _waves(bench, cases):
            began = time.perf_counter()
            bench.compile(wave, self.jobs)
            times = {"load_s": load_s, "compile_s": time.perf_counter() - began}
            for (params, floors), mode in product(runs, modes):
                bench.route(params, floors)
                if bench.fetching:
                    bench.fetching = replace(bench.fetching, late=mode == LATE)
                self._run(bench, bench_of, mode, wave, rows, times)

    def _run(
        self,
        bench: Bench,
        bench_of: LayoutBench,
        mode: str,
        cases: list[Case],
        rows: list[Row],
        times: dict[str, float],
    ) -> None:
        """Adds the rows of cases that are compiled, and writes all rows after each."""
        routing = bench.floors.routing
        for case in cases:
            if (routing, mode) not in self._left(rows, bench_of.sets.placement, [mode], case):
                continue
            rows.append(self._row(bench, bench_of, mode, case, times))
            progress_line(f"{routing} routing, {case_line(rows[-1])}")
            write_rows(self.json, rows, self.notes)
            self._add_profile(bench, case, rows[-1])

    def _row(
        self, bench: Bench, bench_of: LayoutBench, mode: str, case: Case, times: dict[str, float]
    ) -> Row:
        row = row_of(bench.run(case), bench_of.name, bench.floors.routing, mode)
        check_sums(bench.compiled)
        row |= {key: round(seconds, 1) for key, seconds in times.items()}
        row |= bench_of.columns(row, bench.dispatches(case)[0].bucket)
        row |= self._products(bench, bench_of, case, row["us"])
        return row | {"bytes_per_device": bench_of.memory(bench.programs)}

    def _products(
        self, bench: Bench, bench_of: LayoutBench, case: Case, us: float | None
    ) -> dict[str, float | None]:
        """Of a prompt its operations, the rate of bf16 products of all devices, and the part of it
        that its time amounts to.
        """
        if case.phase not in PROMPTS or self.matmul is None:
            return dict.fromkeys(("tflop", "matmul_tflops", "matmul_pct"))
        operations = tflop(bench.floors, case, bench.dispatches(case))
        rate = self.matmul * bench_of.sets.placement.division.layout.devices
        percent = round(share_pct(operations, us, rate), 1) if us else None
        # Of small models few digits are left otherwise.
        return {
            "tflop": float(f"{operations:.5g}"),
            "matmul_tflops": float(f"{rate:.4g}"),
            "matmul_pct": percent,
        }

    def _add_profile(self, bench: Bench, case: Case, row: Row) -> None:
        if self.profile is None or not row["measured"]:
            return
        place = {"case": named(row), "layout": row["layout"], "routing": row["routing"]}
        for found in bench.profiled(case, row["us"]):
            self.profiles.append(place | found)
            write_rows(self.profile, self.profiles, self.notes)
        progress_line(f"{named(row)}: traced")

    def _note_weights(self, sets: WeightSets, held: int, seconds: float, on_host: bool) -> None:
        layers, tables = self.cfg.num_hidden_layers, self.cfg.engram_num_embeddings
        shared = f"layer i uses set i mod {sets.count}" if sets.count < layers else "none shared"
        name = sets.placement.division.layout.name
        order = "packed for Hopper" if sets.packed else "in the released order"
        files = f" in {table_bytes(self.cfg) / 1e9:.3g} GB of mapped files" if on_host else ""
        note = (
            f"{name}: {layers} layers, {sets.count} weight sets resident ({shared}),"
            f" {held / 1e9:.1f} GB on all devices, experts {order}; Engram tables of"
            f" {', '.join(map(str, tables)) or 'no'} rows{files}; made in {seconds:.0f} s"
        )
        self.notes.append(note)
        progress_line(note)


def _waves(bench: Bench, cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that are compiled together: each wave needs a few executables, so that there are
    results early and nothing compiles while something is timed.
    """
    wave: list[Case] = []
    for case in cases:
        if wave and len(bench.wanted([*wave, case])) > _WAVE:
            yield wave
            wave = []
        wave.append(case)
    yield wave


def drafting(cases: list[Case]) -> bool:
    """Whether some of them need the draft stages."""
    return any(c.phase == "draft" or any(g.drafts for g in c.groups) for c in cases)
