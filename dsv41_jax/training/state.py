"""Everything a run consists of between two steps, and its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from jax import Array

from dsv41_jax.errors import UserError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Master parameters f32 by path, the optimiser's state, and the steps taken, int32 [].

    Batches, draft places and schedules follow from the step and the seed, so this is all.
    """

    values: dict[str, Array]
    optimiser: optax.OptState
    step: Array


class Checkpoints:
    """The newest states of a run in DIR/steps, each with the record of the run up to it."""

    def __init__(self, directory: Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            (directory / "steps").absolute(), options=options, item_names=("state", "record")
        )

    def save(self, state: TrainState, record: Mapping[str, Any]) -> None:
        """Whole or not at all: a run that is killed meanwhile resumes from the state before. A
        step that is there stays.
        """
        if self._manager.latest_step() == int(state.step):
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(dict(record))
        )
        self._manager.save(int(state.step), args=items)
        self._manager.wait_until_finished()

    def newest(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The last state saved and its record; UserError if there is none or it is of another
        model.
        """
        step = self._manager.latest_step()
        if step is None:
            raise UserError(f"{self._manager.directory}: holds no state to resume from")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(shapes), record=ocp.args.JsonRestore()
        )
        try:
            found = self._manager.restore(step, args=items)
        except ValueError as error:
            raise UserError(f"{self._manager.directory}: another model's state: {error}") from error
        return found["state"], found["record"]

    @property
    def empty(self) -> bool:
        return self._manager.latest_step() is None

    def close(self) -> None:
        self._manager.close()
