"""Counts compilations, to prove that none happens after warm-up."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles = 0


def _on_event(event: str, _duration: float, **_: object) -> None:
    global _compiles
    _compiles += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_on_event)


class CompileCounter:
    """Compilations of this process since ``start``; 0 means the hot path compiled nothing."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._at_start = _compiles

    @property
    def count(self) -> int:
        return _compiles - self._at_start
