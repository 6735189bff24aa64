"""What the studies with a small trainer of their own share: a cell is a typed section, and needs no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ValidationError

from unitsphere.common.errors import UsageError, check_word
from unitsphere.config.fields import Section
from unitsphere.methods.resolve import explain
from unitsphere.studies.explaining import Line, place, text
from unitsphere.studies.study import Settings, address


@dataclass(frozen=True)
class OwnTrainer:
    """The part of a Runner that does not compute. scale: a name of `scales`, which says what is smaller there."""

    scale: str | None = None
    name: ClassVar[str]
    section: ClassVar[type[Section]]
    scales: ClassVar[Mapping[str, Settings]] = {}

    def resolve(self, given: Settings) -> Settings:
        for setting in given:
            check_word("set", setting, self.section.model_fields)
        everything = {**self.scales.get(self.scale or "", {}), **given}
        try:
            return self.section.model_validate(everything).model_dump(mode="json")
        except ValidationError as error:
            raise UsageError(explain(error)) from None

    def settled(self, settings: Settings) -> Settings:
        return self.resolve(settings)

    def explain(self, given: Settings) -> Sequence[Line]:
        return [(name, text(value), place(name, given)) for name, value in self.resolve(given).items()]

    def takes(self, given: Settings, name: str) -> bool:
        return True

    def run_of(self, given: Settings) -> str:
        return address(self.name, self.resolve(given))

    def row_of(self, given: Settings) -> str:
        return self.run_of(given)

    def hours(self, given: Settings) -> float | None:
        return None

    def data(self, given: Settings, store: Path) -> Sequence[str]:
        return ()
