"""The settings of the protocols: one model each, with its checks and the text of --help. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from unitsphere.common.errors import UsageError, check_word, nearest
from unitsphere.evaluation.recipes import FINE_TUNING_RECIPES, LINEAR_RECIPES

__all__ = ["Settings"]


def several(value: Any) -> Any:
    """One number is a list of one, and text is parted by commas. Arrays and tensors will do too."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return (value,) if isinstance(value, int | float) else value


def positive(rates: tuple[float, ...]) -> tuple[float, ...]:
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError("rates must be numbers greater than 0")
    return rates


def at_least_zero(rates: tuple[float, ...]) -> tuple[float, ...]:
    if not rates or not all(0 <= rate < math.inf for rate in rates):
        raise ValueError("rates must be numbers of at least 0 (0 freezes)")
    return rates


def known_recipe(recipes: Mapping[str, Any], name: str) -> str:
    check_word("recipe", name, recipes)
    return name


LR = "of the classifier: one rate, or several to choose from on held-out training images"
EPOCHS = "epochs; the drops of the rate keep their share of them"
Counts = Annotated[tuple[int, ...], BeforeValidator(several)]
Rates = Annotated[tuple[float, ...], BeforeValidator(several), AfterValidator(positive)]
LinearName = Annotated[str, AfterValidator(partial(known_recipe, LINEAR_RECIPES))]
FineTuningName = Annotated[str, AfterValidator(partial(known_recipe, FINE_TUNING_RECIPES))]
EncoderRates = Annotated[tuple[float, ...], BeforeValidator(several), AfterValidator(at_least_zero)]


class Settings(BaseModel):
    """What may be asked of every protocol. The model of a protocol adds its own fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: int = Field(0, description="of classifiers, held-out tenths, folds and fractions")


class KnnSettings(Settings):
    k: Counts | None = Field(None, description="numbers of neighbours (default: 20,200, or what there is)")
    temperature: float = Field(0.1, gt=0, description="votes weigh exp(cosine/T)")


class LinearSettings(Settings):
    recipe: LinearName | None = Field(
        None,
        description=f"{', '.join(LINEAR_RECIPES)} (default: moco; of transfer that of the data, else inaturalist2018)",
    )
    lr: Rates | None = Field(None, description=LR)
    epochs: int | None = Field(None, ge=1, description=EPOCHS)
    augment: bool = Field(False, description="the faithful form: fresh crops and flips each epoch (slow)")


class FinetuneSettings(Settings):
    recipe: FineTuningName | None = Field(
        None, description=f"{', '.join(FINE_TUNING_RECIPES)} (default: full; of semi the nearer of MSBReg's)"
    )
    lr: Rates | None = Field(None, description=LR)
    encoder_lr: EncoderRates | None = Field(None, description="of the backbone; 0 leaves it as it is")
    epochs: int | None = Field(None, ge=1, description=EPOCHS)


class SemiSettings(FinetuneSettings):
    fraction: float | None = Field(None, gt=0, le=1, description="share of every class that is labelled, e.g. 0.01")
    labelled: Path | None = Field(None, description="instead: a file of the labelled training images, one name a line")

    @model_validator(mode="after")
    def one_of_two(self) -> SemiSettings:
        if (self.fraction is None) == (self.labelled is None):
            raise ValueError("semi: give one of --fraction SHARE (0.01 and 0.1 are usual) and --labelled FILE")
        return self


def checked(model: type[Any], values: Mapping[str, Any]) -> Any:
    """Return `model` with these values, or raise UsageError with all that is wrong with them."""
    try:
        return model(**values)
    except ValidationError as error:
        raise UsageError("\n".join(map(explained, error.errors()))) from None


def explained(mistake: Mapping[str, Any]) -> str:
    """Say what was given, what is allowed, and what is near."""
    name, given = ".".join(map(str, mistake["loc"][:1])), mistake["input"]
    if mistake["type"] == "literal_error":
        allowed = mistake["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{name}: {given!r} is not known.{nearest(str(given), allowed)} Allowed: {', '.join(allowed)}."
    if mistake["type"] == "value_error":
        said = str(mistake["ctx"]["error"])
        return f"{name}: given {list(given) if isinstance(given, tuple) else given!r}; {said}." if name else f"{said}."
    said = mistake["msg"].replace("Input should be", "it must be")
    return f"{name}: given {given!r}; {said}."
