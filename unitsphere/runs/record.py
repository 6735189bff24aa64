"""A run's record: what is needed to use its backbone, as plain data that is readable without the method's class.

It lies in every checkpoint and as record.json in the run. Loading, transforms, evaluation, embedding and comparison
stand on it alone. Only resuming needs the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from unitsphere.common.errors import UsageError
from unitsphere.config.config import Config
from unitsphere.methods.embedding import reconstructed
from unitsphere.methods.resolve import Resolved, explain

__all__ = ["HeadRecord", "Record"]


class HeadRecord(BaseModel):
    """How a projection head is built again: see modules/heads.py."""

    model_config = ConfigDict(frozen=True)

    kind: str
    dim: int
    hidden: int | None = None
    norm: str = "batch"


class Record(BaseModel):
    """How to rebuild backbone and head, what their input must look like, and what they were trained on.

    head: None where the method has none, or one of its own making. mean, std: per channel in [0, 1]. classes: the
    classes that the images were restricted to. class_names: those that a supervised run tells apart, in the order of
    its scores. reconstructed: losses whose formula no paper states.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    method: str
    backbone: str = "resnet50"
    stem: str = "imagenet"
    norm: str = "batch"
    head: HeadRecord | None = None
    channels: int = 3
    depth: int = 8
    image_size: int = 224
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    data: str = "custom"
    holdout: float = 0.1
    classes: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    max_broken: float = 0.01
    epochs: int = 0
    seed: int = 0
    reconstructed: tuple[str, ...] = ()

    @property
    def caveats(self) -> dict[str, list[str]]:
        """What results must say of the training, if anything."""
        return {"reconstructed": list(self.reconstructed)} if self.reconstructed else {}

    @classmethod
    def of(cls, resolved: Resolved, class_names: tuple[str, ...] | None = None) -> Record:
        """The record of a run with this configuration."""
        config = resolved.config
        values = common_values(config.model_dump(mode="json"), resolved.method.has_embedding_head)
        return cls(**{**values, "reconstructed": config.reconstructed, "class_names": class_names})

    @classmethod
    def read(cls, meta: Mapping[str, Any], name: str) -> Record:
        """The record in a checkpoint's metadata, or in a record.json; of a checkpoint before format 2, what its
        configuration says. name: of the file, for messages."""
        try:
            if "record" in meta:
                return cls.model_validate(meta["record"])
            values = meta["config"]
            losses = reconstructed(values)
            return cls.model_validate({**common_values(values, "head" in values), "reconstructed": losses})
        except ValidationError as error:
            raise UsageError(f"{name} is damaged or of another version:\n{explain(error)}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{name} is damaged or of another version: it has no record of its run.") from error


def common_values(values: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
    """The fields of a configuration that a record has too."""
    found = {name: values[name] for name in Record.model_fields if name in values and name in Config.model_fields}
    if has_head:
        found["head"] = {
            "kind": values["head"],
            "dim": values["dim"],
            "hidden": values.get("hidden"),
            "norm": values.get("head_norm", "batch"),
        }
    return found
