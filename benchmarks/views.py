"""Two views of a batch on the device: unitsphere's forms beside torchvision's and kornia's transforms.

    python -m benchmarks.views --json benchmarks/results/views-h200.json

Images are noise and already on the device. `as in a run` draws the parameters, sends them and makes the views; `device
alone` replays the making as a CUDA graph; `host alone` is the drawing, done while the device works on the last step.
The peers get the same policy, with all sources of one size, which is easier:

- torchvision image by image: what a data set's transform does, timed for a few images and scaled to the batch.
- torchvision for the batch: every image gets the same crop, colours and blur.
- kornia: parameters of each image's own, but one order of the jitter for all, and no antialiasing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from benchmarks.measuring import Results, Row, milliseconds
from unitsphere.common.devices import send
from unitsphere.common.randomness import generator
from unitsphere.images.canvas import Canvas
from unitsphere.views.apply import can_fuse, parameters
from unitsphere.views.draw import draw
from unitsphere.views.policies import POLICIES, Policy
from unitsphere.views.render import Frame, Render, blur_reach, render

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ONE_BY_ONE = 32  # images of the row that is scaled to the batch


@dataclass(frozen=True)
class Setting:
    """heights, widths: the range of the sources. part: images that the plain form pads and renders at a time."""

    policy: Policy
    size: int
    batch: int
    heights: tuple[int, int]
    widths: tuple[int, int]
    part: int

    def row(self, ms: float) -> Row:
        return {"ms": round(ms, 3), "images_per_second": round(1e3 * self.batch / ms)}

    def canvas(self, device: torch.device) -> Canvas:
        random = generator(0, "sizes")
        heights, widths = (
            torch.randint(low, high + 1, (self.batch,), generator=random) for low, high in (self.heights, self.widths)
        )
        offsets = torch.cumsum(heights * widths, 0) - heights * widths
        return Canvas(noise((int((heights * widths).sum()), 3), device), offsets, heights, widths)

    def batch_of_one_size(self, device: torch.device) -> Tensor:
        """(N, 3, H, W) uint8, of the mean height and width."""
        return noise((self.batch, 3, sum(self.heights) // 2, sum(self.widths) // 2), device)


SETTINGS = {
    "views 32": Setting(POLICIES["moco-v2-small"], 32, 512, (32, 32), (32, 32), 512),
    "views 224": Setting(POLICIES["moco-v2"], 224, 256, (325, 425), (450, 550), 64),
}
TINY = {"views tiny": Setting(POLICIES["moco-v2"], 32, 8, (40, 60), (50, 70), 4)}


def noise(shape: tuple[int, ...], device: torch.device) -> Tensor:
    random = torch.Generator(device).manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=random)


def compare_views(results: Results, tiny: bool) -> None:
    for section, setting in (TINY if tiny else SETTINGS).items():
        device = results.device
        (top, bottom), (left, right) = setting.heights, setting.widths
        results.section(
            section,
            f"two views of {setting.batch} images, {top}-{bottom} x {left}-{right} to {setting.size}x{setting.size}, "
            f"{setting.policy.describe()}",
        )
        results.add(section, "torchvision, image by image", partial(time_one_by_one, setting, device))
        results.add(section, "torchvision, the whole batch alike", partial(time_batch_alike, setting, device))
        if find_spec("kornia") is not None:
            results.add(section, "kornia", partial(time_kornia, setting, device))
        for name, form in forms(setting, device).items():
            results.add(section, f"unitsphere {name}, as in a run", partial(time_as_in_a_run, setting, form, device))
            if device.type == "cuda":
                results.add(section, f"unitsphere {name}, device alone", partial(time_device, setting, form, device))
        results.add(section, "unitsphere, host alone", partial(time_host, setting, device))


def forms(setting: Setting, device: torch.device) -> dict[str, Render]:
    """The plain ones work part by part, in parts of equal shapes; the fused one needs no padding."""

    def in_parts(form: Render) -> Render:
        def whole(pixels: Tensor, numbers: Tensor, frame: Frame) -> Tensor:
            return torch.cat([form(pixels, part, frame) for part in numbers.split(setting.part)])

        return whole

    found = {"plain": in_parts(render)}
    if can_fuse(setting.canvas(device)):
        from unitsphere.views import fused

        found |= {"compiled": in_parts(torch.compile(render, dynamic=False)), "fused": fused.render}
    return found


def frame_of(setting: Setting) -> Frame:
    return Frame(setting.policy, setting.size, setting.heights[1], setting.widths[1], 255, MEAN, STD)


def numbers_of(setting: Setting, canvas: Canvas, step: int) -> list[Tensor]:
    """Of both views, on the CPU."""
    tables = (draw(setting.policy, setting.batch, generator(0, "views", step, view)) for view in range(2))
    return [parameters(canvas, table, setting.size) for table in tables]


def time_as_in_a_run(setting: Setting, form: Render, device: torch.device) -> Row:
    canvas, frame, steps = setting.canvas(device), frame_of(setting), count()

    def two_views() -> None:
        for numbers in numbers_of(setting, canvas, next(steps)):
            form(canvas.pixels, send(numbers, device), frame)

    return setting.row(milliseconds(two_views, device))


def time_device(setting: Setting, form: Render, device: torch.device) -> Row:
    canvas, frame = setting.canvas(device), frame_of(setting)
    both = [numbers.to(device) for numbers in numbers_of(setting, canvas, 0)]

    def two_views() -> list[Tensor]:
        return [form(canvas.pixels, numbers, frame) for numbers in both]

    two_views()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two_views()
    return setting.row(milliseconds(graph.replay, device))


def time_host(setting: Setting, device: torch.device) -> Row:
    canvas, steps = setting.canvas(device), count()
    return setting.row(milliseconds(lambda: numbers_of(setting, canvas, next(steps)), torch.device("cpu")))


def torchvision_transform(policy: Policy, size: int) -> v2.Transform:
    """What a user writes for the policy: on uint8 up to the end."""
    jitter = v2.ColorJitter(policy.brightness, policy.contrast, policy.saturation, policy.hue)
    steps = [
        v2.RandomResizedCrop(size, scale=policy.crop_scale, antialias=True),
        v2.RandomApply([jitter], policy.jitter),
        v2.RandomGrayscale(policy.grey),
    ]
    if policy.blur:
        steps.append(v2.RandomApply([v2.GaussianBlur(2 * blur_reach(size) + 1, policy.blur_sigma)], policy.blur))
    flip = v2.RandomHorizontalFlip(policy.flip)
    return v2.Compose([*steps, flip, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def time_one_by_one(setting: Setting, device: torch.device) -> Row:
    transform = torchvision_transform(setting.policy, setting.size)
    images = setting.batch_of_one_size(device)[:ONE_BY_ONE].unbind(0)
    ms = milliseconds(lambda: twice(lambda: torch.stack([transform(image) for image in images])), device, warm_up=2)
    return setting.row(ms * setting.batch / len(images))


def time_batch_alike(setting: Setting, device: torch.device) -> Row:
    transform = torchvision_transform(setting.policy, setting.size)
    images = setting.batch_of_one_size(device)
    return setting.row(milliseconds(lambda: twice(lambda: transform(images)), device))


def time_kornia(setting: Setting, device: torch.device) -> Row:
    import kornia.augmentation as augmentation

    policy, size = setting.policy, setting.size
    steps: list[nn.Module] = [
        # Its quicker way to crop: the other goes image by image.
        augmentation.RandomResizedCrop((size, size), policy.crop_scale, policy.crop_ratio, cropping_mode="resample"),
        augmentation.ColorJitter(policy.brightness, policy.contrast, policy.saturation, policy.hue, p=policy.jitter),
        augmentation.RandomGrayscale(p=policy.grey),
    ]
    if policy.blur:
        width = 2 * blur_reach(size) + 1
        steps.append(augmentation.RandomGaussianBlur((width, width), policy.blur_sigma, p=policy.blur))
    ends = [augmentation.RandomHorizontalFlip(p=policy.flip), augmentation.Normalize(MEAN, STD)]
    transform = nn.Sequential(*steps, *ends).to(device)
    images = setting.batch_of_one_size(device)
    return setting.row(milliseconds(lambda: twice(lambda: transform(images.float() / 255)), device))


def twice(view: Callable[[], Any]) -> None:
    for _ in range(2):
        view()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows with one of these in SECTION/ROW")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few small images: to try the command, not to measure")
    options = parser.parse_args()
    compare_views(Results(options.json, torch.device(options.device), options.only), options.tiny)


if __name__ == "__main__":
    main()
