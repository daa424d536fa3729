"""Cases compiled, run and timed."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dsv41_jax.cache import Cache
from dsv41_jax.command import progress_line
from dsv41_jax.layer_plan import layer_plan
from serving.bench.forward_cache import filled_cache
from serving.bench.forward_cases import Case, Dispatch, dispatches
from serving.bench.forward_engram import Fetching, HostSteps
from serving.bench.forward_floor import Floors
from serving.bench.forward_inputs import layer_rows, lengths_of, program_inputs
from serving.bench.forward_launches import kernels, launches
from serving.bench.forward_layers import (
    between_layers,
    cache_part,
    copies,
    ends_params,
    layer_params,
    lowered_ends,
    lowered_layer,
    put_back,
)
from serving.bench.forward_model import kind, kinds
from serving.bench.forward_profile import STEPS, profile, traced
from serving.bench.forward_programs import (
    PROFILED_COMMAND_BUFFERS,
    WITHOUT_COMMAND_BUFFERS,
    SharedPrograms,
)
from serving.bench.forward_steps import Steps
from serving.bench.forward_time import Timing, addresses, timed
from serving.buckets import Bucket
from sharding.hlo import Traffic, collectives

# What a compiler, a device, a kernel that refuses or a file raises; all else is an error of ours.
_FAULTS = RuntimeError, ValueError, OSError
_VERIFY_STEPS = 80  # within the room that a case leaves for accepted drafts
_PLAIN, _CAPTURED, _PROFILED = 0, 1, 2
_OPTIONS = {_PLAIN: WITHOUT_COMMAND_BUFFERS, _PROFILED: PROFILED_COMMAND_BUFFERS}


@dataclass(frozen=True)
class Executable:
    """What to compile: a whole program, one layer, or ("ends") what stands beside the layers.
    detail: number of the layer, rows that are scored, or whether command buffers are on, and stay
    on in a profile.
    """

    kind: str
    bucket: Bucket
    detail: int

    def lowered(self, programs: SharedPrograms) -> jax.stages.Lowered:
        if self.kind == "layer":
            return lowered_layer(programs, self.detail, self.bucket)
        if self.kind == "ends":
            return lowered_ends(programs, self.bucket, self.detail)
        return programs.traced(self.kind, self.bucket).lower()

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.kind in ("layer", "ends") else _OPTIONS.get(self.detail, {})

    def __str__(self) -> str:
        name = f"layer {self.detail}" if self.kind == "layer" else self.kind
        remark = f", {', '.join(self.options)}" if self.options else ""
        return f"{name} {self.bucket.requests} x {self.bucket.rows}{remark}"


@dataclass
class Measured:
    """Of one case. why: why there is no time, or none of its parts. moved, results_moved: arrays of
    the cache, and of what a step returns, that a step left at another address. finite: of the
    results. fetch_us: of Engram rows on the host, hashed, gathered and copied by themselves.
    """

    case: Case
    floor_us: float
    timing: Timing | None = None
    why: str = ""
    launches: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, Traffic] = field(default_factory=dict)
    moved: int = 0
    results_moved: int = 0
    finite: bool = True
    fetch_us: float | None = None
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Bench:
    """Programs over one cache shape. chunk: most rows of a prompt's dispatch. layers: whether
    single layers are timed too. profiles: whether ``profiled`` will be asked for. fetching: how
    Engram rows come from the host, if they do.
    """

    programs: SharedPrograms
    params: Any
    floors: Floors
    chunk: int
    layers: bool
    profiles: bool = False
    fetching: Fetching | None = None
    compiled: dict[Executable, Any] = field(default_factory=dict)
    _parts: dict[tuple, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fill, self._between = filled_cache(self.programs), between_layers(self.programs)

    def dispatches(self, case: Case) -> list[Dispatch]:
        return dispatches(self.programs.cfg, case, self.chunk)

    def route(self, params: Any, floors: Floors) -> None:
        """Go on with the tables of another routing; what is compiled stays."""
        self.params, self.floors = params, floors
        self._parts.clear()

    def wanted(self, cases: Iterable[Case]) -> list[Executable]:
        """Everything that the cases need and nothing has compiled yet."""
        found: dict[Executable, None] = {}
        for case in cases:
            for dispatch in self.dispatches(case):
                found |= {_whole(dispatch, mode): None for mode in self._modes(case)}
                found |= dict.fromkeys(self._of_parts(case, dispatch))
        return [one for one in found if one not in self.compiled]

    def compile(self, cases: Iterable[Case], jobs: int) -> None:
        """What ``wanted`` lists, several at a time; why something could not be compiled is kept in
        its place.
        """

        def compile_one(one: Executable) -> tuple[Executable, Any]:
            began = time.perf_counter()
            try:
                made = one.lowered(self.programs).compile(one.options)
            except _FAULTS as error:  # other cases can do without it
                made = f"{one} does not compile: {_first_line(error)}"
                progress_line(made)
            else:
                progress_line(f"compiled {one}: {time.perf_counter() - began:.1f} s")
            return one, made

        with ThreadPoolExecutor(jobs) as pool:
            self.compiled |= dict(pool.map(compile_one, self.wanted(cases)))

    def run(self, case: Case) -> Measured:
        """Times of a case; its executables are compiled."""
        plan = self.dispatches(case)
        found = Measured(case, sum(self.floors.dispatch(dispatch) for dispatch in plan))
        executables = [self.compiled[_whole(dispatch, int(case.captured))] for dispatch in plan]
        wanted = [part for dispatch in plan for part in self._of_parts(case, dispatch)]
        found.why = self._obstacle([*executables, *(self.compiled[part] for part in wanted)])
        if found.why:
            return found
        texts = [executable.as_text() for executable in executables]
        found.launches = sum(map(launches, texts))
        found.kernels = kernels("".join(texts))
        found.collectives = collectives("".join(texts))
        try:
            self._time(found, plan, executables)
        except _FAULTS as error:  # other cases are still to be measured
            found.parts, found.why = {}, _first_line(error)
        return found

    def _time(self, found: Measured, plan: list[Dispatch], executables: list[Any]) -> None:
        steps = self._steps(found.case, executables)
        self._whole(found, steps)
        if self.layers and found.case.captured:
            cache = steps.cache
            for dispatch in plan:
                cache = self._add_parts(found, found.case, dispatch, cache)

    def _steps(self, case: Case, executables: list[Any]) -> Steps:
        """Of a case's dispatches on a filled cache."""
        plan, cfg = self.dispatches(case), self.programs.cfg
        cache = self._fill(jnp.asarray(lengths_of(self.programs.shape.slots, plan)))
        inputs = [self.programs.put(program_inputs(cfg, one, case.replay)) for one in plan]
        given = self.params, cache, plan, executables, inputs
        if self.fetching is None:
            return Steps(*given)
        fetches = [self.fetching.fetch(cfg, one, replay=case.replay) for one in plan]
        return HostSteps(*given, fetches, self.fetching.late)

    def profiled(self, case: Case, wall_us: float) -> Iterator[dict[str, Any]]:
        """What ``profile`` finds in a step of a case that was measured, for each way to launch its
        kernels.
        """
        plan = self.dispatches(case)
        every = layer_plan(self.programs.cfg)
        layers = [kind(every[i]) for dispatch in plan for i in self.floors.layers(dispatch)]
        for mode in self._modes(case):
            executables = [self.compiled[_whole(dispatch, mode)] for dispatch in plan]
            name = "graph" if mode == _PROFILED else "launches"
            row = {"mode": name, "wall_us": round(wall_us, 2)}
            if why := self._obstacle(executables):
                yield row | {"why": why}
            else:
                yield row | profile(traced(self._steps(case, executables)), STEPS, layers)

    def _modes(self, case: Case) -> list[int]:
        """How whole programs of a case are compiled; a CPU has no command buffers."""
        more = self.profiles and case.captured and jax.default_backend() == "gpu"
        return [int(case.captured), *([_PROFILED] if more else [])]

    def _obstacle(self, executables: list[Any]) -> str:
        """Why they cannot run, or need more than the device has left beside a cache; else empty."""
        broken = [made for made in executables if isinstance(made, str)]
        if broken:
            return broken[0]
        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            return ""
        leaves = jax.tree.leaves(self.programs.cache_shapes())
        cache = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // self.programs.ranks
        free = stats["bytes_limit"] - stats["bytes_in_use"] - cache
        sizes = [executable.memory_analysis() for executable in executables]
        needed = max(
            size.temp_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes
            for size in sizes
        )
        if needed <= free:
            return ""
        return f"needs {needed / 1e9:.1f} GB beside weights and cache, {free / 1e9:.1f} GB are free"

    def _whole(self, found: Measured, step: Steps) -> None:
        jax.block_until_ready(step())
        before = addresses(step.lasting)
        plan = step.plan
        prompt = any(dispatch.program in ("encode", "prefill_full") for dispatch in plan)
        verifies = any(dispatch.program == "verify" for dispatch in plan)
        found.timing = timed(step, latency=prompt, most=_VERIFY_STEPS if verifies else None)
        found.moved = _differing(before, addresses(step.lasting))
        found.results_moved = _differing(addresses(step()), addresses(step()))
        found.finite = all(
            bool(jnp.all(jnp.isfinite(leaf)))
            for leaf in jax.tree.leaves(step())
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        )
        if isinstance(step, HostSteps):
            found.fetch_us = timed(step.fetch_all, latency=True).us

    def _of_parts(self, case: Case, dispatch: Dispatch) -> list[Executable]:
        """Executables of the layers of each kind, and of the ends."""
        if not self.layers or not case.captured:
            return []
        found = [
            Executable("layer", dispatch.bucket, at[0]) for at in self._kinds(dispatch).values()
        ]
        if dispatch.program not in ("encode", "draft"):
            found.append(_ends(dispatch))
        return found

    def _kinds(self, dispatch: Dispatch) -> dict[str, list[int]]:
        """Kind -> the layers of it that a dispatch runs."""
        ran = set(self.floors.layers(dispatch))
        found = {name: [i for i in at if i in ran] for name, at in kinds(self.programs.cfg).items()}
        return {name: at for name, at in found.items() if at}

    def _add_parts(self, found: Measured, case: Case, dispatch: Dispatch, cache: Cache) -> Cache:
        rows = self.programs.put(layer_rows(self.programs.cfg, dispatch, case.replay))
        for name, at in self._kinds(dispatch).items():
            key = at[0], dispatch.bucket, dispatch.places[0].start
            if key not in self._parts:
                self._parts[key], cache = self._layer(dispatch, at[0], rows, cache)
            _add(found.parts, name, self._parts[key], len(at))
        if dispatch.program not in ("encode", "draft"):
            key = _ends(dispatch), dispatch.program
            if key not in self._parts:
                self._parts[key] = self._ends(dispatch, rows)
            _add(found.parts, "ends", self._parts[key], 1)
        return cache

    def _layer(
        self, dispatch: Dispatch, layer: int, rows: Any, cache: Cache
    ) -> tuple[dict[str, Any], Cache]:
        executable = self.compiled[Executable("layer", dispatch.bucket, layer)]
        count = copies(self.programs, dispatch.bucket)
        params = layer_params(self.programs, self.params, layer, dispatch.bucket)
        ratio = layer_plan(self.programs.cfg)[layer].ratio or 1
        part = cache_part(cache, self.programs, layer)
        between = self._between(rows, jnp.int32(ratio))

        def step() -> Any:
            nonlocal part, between
            part, between = executable(params, part, between, rows)
            return between.pre

        timing = timed(step).divided(count)
        floor, text = self.floors.layer(dispatch, layer), executable.as_text()
        return _part(timing, floor, launches(text) / count), put_back(cache, part)

    def _ends(self, dispatch: Dispatch, rows: Any) -> dict[str, Any]:
        executable = self.compiled[_ends(dispatch)]
        params = ends_params(self.params)
        sampling = self.programs.put(program_inputs(self.programs.cfg, dispatch, True)[1])
        timing = timed(lambda: executable(params, rows, sampling))
        return _part(timing, self.floors.ends(dispatch), launches(executable.as_text()))


def _whole(dispatch: Dispatch, mode: int) -> Executable:
    return Executable(dispatch.program, dispatch.bucket, mode)


def _ends(dispatch: Dispatch) -> Executable:
    scored = dispatch.bucket.rows if dispatch.program == "verify" else 1
    return Executable("ends", dispatch.bucket, scored)


def _part(timing: Timing, floor_us: float, launched: float) -> dict[str, Any]:
    return asdict(timing) | {"floor_us": floor_us, "launches": launched}


def _add(parts: dict[str, dict[str, Any]], name: str, one: dict[str, Any], count: int) -> None:
    """One more dispatch's layers of a kind; ``total_us`` sums over dispatches and layers."""
    before = parts.get(name, {"count": 0, "total_us": 0.0})
    parts[name] = one | {
        "count": before["count"] + count,
        "total_us": before["total_us"] + count * one["us"],
    }


def _differing(before: list[int], after: list[int]) -> int:
    return sum(a != b for a, b in zip(before, after, strict=True))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}"
