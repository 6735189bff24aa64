"""Which of the quick forms of a step pay: compiled networks, and a step that is recorded as a CUDA graph."""

from __future__ import annotations

from typing import NamedTuple

from unitsphere.common.distributed import world
from unitsphere.modules.names import BUILT_IN
from unitsphere.training.prepare import Prepared

# Compiling costs up to two minutes, of which a ResNet-50 has the most, and saves about a third of a step. Where norms
# have groups it saves two thirds: 19 ms of a ResNet-18's, which takes 35 to 54 s.
STEPS_THAT_PAY, GROUPED_STEPS_THAT_PAY = 4000, 3000


class Speed(NamedTuple):
    compile: bool
    record: bool


def choose_speed(prepared: Prepared, steps: int, custom: bool) -> Speed:
    """Compile where the steps to come pay it back, record where it is safe: by default with networks that we know.
    What ranks say to each other is not recorded."""
    config, cuda = prepared.config, prepared.device.type == "cuda"
    known = cuda and not custom and config.backbone in BUILT_IN
    pays = GROUPED_STEPS_THAT_PAY if config.bn_groups > world() else STEPS_THAT_PAY
    recordable = cuda and world() == 1 and prepared.precision != "fp16"
    return Speed(
        compile=known and steps >= pays if config.compile is None else config.compile,
        record=recordable and (known if config.record is None else config.record),
    )
