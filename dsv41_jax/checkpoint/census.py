"""A checkpoint's headers against the inventory: what is missing, unknown, wrong or left out."""

from dataclasses import dataclass, field

from dsv41_jax.checkpoint.inventory import Part, TensorSpec, inventory, vision_inventory
from dsv41_jax.checkpoint.safetensors_files import TensorFiles
from dsv41_jax.config import Config


@dataclass
class Census:
    """The outcome; every list holds tensor names, `wrong` holds a line per fault.

    `present` are the expected tensors that are there, right or wrong.
    """

    draft_stages: int
    present: dict[str, TensorSpec] = field(default_factory=dict)
    missing: dict[Part, list[str]] = field(
        default_factory=lambda: {"text": [], "mtp": [], "vision": []}
    )
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def has_part(self, part: Part) -> bool:
        return any(spec.part == part for spec in self.present.values())

    @property
    def has_draft(self) -> bool:
        """Whether the mtp part is there and complete."""
        return self.has_part("mtp") and not self.missing["mtp"]

    def problems(self, *, speculation: bool) -> list[str]:
        """Every reason not to load; absent draft tensors count only with speculation."""
        missing = self.missing["text"] + (self.missing["mtp"] if speculation else [])
        draft = ["mtp.*: num_nextn_predict_layers is 0, so there is no draft for speculation"]
        return [
            *self.files,
            *self.wrong,
            *(f"{name}: is missing" for name in missing),
            *(f"{name}: unknown tensor" for name in self.unknown),
            *(draft if speculation and not self.draft_stages else []),
        ]


def take_census(files: TensorFiles, cfg: Config) -> Census:
    """Compare names, dtypes and shapes; reads no tensor data.

    Vision tensors may be absent, and are known by name and shape even where the config has no
    vision layers.
    """
    census = Census(cfg.num_nextn_predict_layers, files=list(files.problems))
    expected = inventory(cfg)
    known = vision_inventory(cfg) | expected
    for name in expected:
        if name not in files and name not in files.damaged:
            census.missing[expected[name].part].append(name)
    for name in files:
        if name not in known:
            census.unknown.append(name)
            continue
        spec, entry = known[name], files.entry(name)
        census.present[name] = spec
        if entry.dtype != spec.dtype:
            census.wrong.append(f"{name}: dtype {entry.dtype} must be {spec.dtype}")
        if entry.shape != spec.shape:
            census.wrong.append(f"{name}: shape {list(entry.shape)} must be {list(spec.shape)}")
    return census
