"""Backbones: images (N, C, H, W) in, features (N, F) out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet as torchvision_resnet
from torchvision.models.resnet import BasicBlock, Bottleneck

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.extras import require
from unitsphere.common.outside import load_named, names_code
from unitsphere.modules.fused_blocks import fuse_norms, uses_kernels
from unitsphere.modules.names import BACKBONES, BUILT_IN, TINY, WIDE, check_backbone

__all__ = ["build_backbone", "feature_dim"]


class TinyResNet(nn.Module):
    """A ResNet for CPUs and tests: a 3x3 stem and three residual blocks of 16, 32 and 64 channels."""

    def __init__(self, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(
            residual_block(width, width),
            residual_block(width, 2 * width),
            residual_block(2 * width, 4 * width),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(self.stem(images)).mean(dim=(2, 3))


def residual_block(inputs: int, outputs: int) -> BasicBlock:
    """torchvision's basic block at stride 2."""
    shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))
    return BasicBlock(inputs, outputs, stride=2, downsample=shortcut)


class StemConv(nn.Conv2d):
    """The 7x7 convolution at stride 2 that begins a ResNet, compiled in a form that GPUs are quick at.

    Tensor cores want channels in eights, and an image has three. Each 2x2 block of pixels becomes one pixel of 12
    channels (16 with zeros), and the kernel, 8x8 with a row and a column of zeros, becomes 4x4 at stride 1: the same
    sums in another order. The parameter is the ordinary 7x7 one. The pixels are moved in one go, by a compiler or in
    half precision by a kernel; where neither is, the ordinary form is the quicker.
    """

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__(channels, width, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNets

    def _conv_forward(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        even = images.shape[2] % 2 == 0 and images.shape[3] % 2 == 0
        if even and images.is_cuda and torch.compiler.is_compiling():
            return self.blocked(images, weight)
        half = torch.is_autocast_enabled("cuda") and not images.requires_grad
        if even and half and uses_kernels(self, images) and self.in_channels <= 4:
            from unitsphere.modules.stem_kernels import pixel_blocks

            return F.conv2d(pixel_blocks(images, torch.get_autocast_dtype("cuda"), 2, 1), self.blocked_kernel(weight))
        return super()._conv_forward(images, weight, bias)

    def blocked(self, images: Tensor, weight: Tensor) -> Tensor:
        spare = -4 * self.in_channels % 8
        blocks = F.pad(F.pixel_unshuffle(images, 2), (2, 1, 2, 1, 0, spare))
        return F.conv2d(blocks, self.blocked_kernel(weight))

    def blocked_kernel(self, weight: Tensor) -> Tensor:
        """Output o reads pixels 2o - 3 .. 2o + 3: with the zero tap in front, blocks o - 2 .. o + 1."""
        kernel = F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2)
        return F.pad(kernel, (0, 0, 0, 0, 0, -4 * self.in_channels % 8))


class SmallStemConv(nn.Conv2d):
    """The 3x3 convolution that begins a ResNet for small images, with zeros beside its channels where a GPU computes in
    half precision: tensor cores want channels in eights. The parameter is the ordinary one."""

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__(channels, width, 3, padding=1, bias=False)

    def _conv_forward(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = torch.is_autocast_enabled("cuda") and images.is_cuda and self.training and not images.requires_grad
        spare = -self.in_channels % 8
        if not half or not spare:
            return super()._conv_forward(images, weight, bias)
        n, channels, *size = images.shape
        dtype, layout = torch.get_autocast_dtype("cuda"), torch.channels_last
        wide = torch.empty(n, channels + spare, *size, dtype=dtype, device=images.device, memory_format=layout).zero_()
        wide[:, :channels] = images
        return super()._conv_forward(wide, F.pad(weight, (0, 0, 0, 0, 0, spare)), bias)


def torchvision_backbone(name: str, channels: int, stem: str, weights: str | None = None) -> nn.Module:
    """A torchvision ResNet without its classifier."""
    model: nn.Module = getattr(torchvision_resnet, name)(weights=weights)
    model.fc = nn.Identity()
    return with_stem(model, channels, stem)


def wide_resnet50(width: int, channels: int, stem: str) -> nn.Module:
    """ResNet-50 with `width` times the channels in every layer, stem and features included, as SimCLR widens it.
    (torchvision's wide_resnet50_2 widens only the 3x3 convolutions.) The names are torchvision's."""
    outputs = 64 * width
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, outputs, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(outputs),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inputs, planes = outputs, 64 * width * 2**stage
        outputs = planes * Bottleneck.expansion
        stride = 1 if stage == 0 else 2
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
        first = Bottleneck(inputs, planes, stride, shortcut)
        layers[f"layer{stage + 1}"] = nn.Sequential(first, *(Bottleneck(outputs, planes) for _ in range(blocks - 1)))
    model = nn.Sequential(OrderedDict(layers, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return with_stem(model, channels, stem)


def with_stem(model: nn.Module, channels: int, stem: str) -> nn.Module:
    """The stem for these images, in place. The small one is a 3x3 convolution without max-pool."""
    old = model.get_submodule("conv1")
    assert isinstance(old, nn.Conv2d)
    if stem == "small":
        model.conv1 = SmallStemConv(channels, old.out_channels)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = StemConv(channels, old.out_channels)
        if channels == 3:
            model.conv1.load_state_dict(old.state_dict())
    return model


def build_backbone(
    name: str,
    *,
    channels: int = 3,
    stem: str = "imagenet",
    zero_init_residual: bool = False,
    named_now: str | None = None,
) -> nn.Module:
    """Build a fresh backbone by name: a ResNet of torchvision, a wide one, `resnet-tiny`, `timm:NAME`, an entry point
    of an installed package, or `package.module:function`.

    The last two are called without arguments; what they return must map images to features.
    zero_init_residual: the last norm of each residual branch begins with weight 0, so that the block is its shortcut.
    named_now: the backbone that the user names in this call. `package.module:function` is imported only if it is this
    one: a name that stands in a file would run whatever the file's author likes.
    """
    check_backbone(name)
    if name.startswith("timm:"):
        return timm_backbone(name.removeprefix("timm:"), channels)
    if name not in BUILT_IN:
        refuse_unnamed_code(name, named_now)
        return called(load_named("backbone", name, BACKBONES), name)
    if name == TINY:
        backbone: nn.Module = TinyResNet(channels)
    elif name in WIDE:
        backbone = wide_resnet50(WIDE[name], channels, stem)
    else:
        backbone = torchvision_backbone(name, channels, stem)
    return fuse_norms(start_at_the_shortcuts(backbone) if zero_init_residual else backbone)


def start_at_the_shortcuts(backbone: nn.Module) -> nn.Module:
    for block in backbone.modules():
        if isinstance(block, BasicBlock):
            nn.init.zeros_(block.bn2.weight)
        elif isinstance(block, Bottleneck):
            nn.init.zeros_(block.bn3.weight)
    return backbone


def timm_backbone(name: str, channels: int, pretrained: bool = False) -> nn.Module:
    require("timm", f"timm:{name}")
    import timm

    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=channels)
    except RuntimeError as error:
        raise UsageError(f"timm knows no model {name!r}: {error}") from error
    except OSError as error:
        raise UnitsphereError(f"the weights of timm's {name} cannot be had: {error}") from error


def refuse_unnamed_code(name: str, named_now: str | None) -> None:
    """Refuse a backbone that is code of a module, unless the user names it in this call."""
    if ":" in name and names_code(name) and not name.startswith("timm:") and name != named_now:
        raise UsageError(
            f"backbone: {name} is code of a module, and a file names it. Nothing is imported unless you name it "
            f"yourself: --backbone {name} (backbone={name!r} in Python). Without it, build the module and give it to "
            "unitsphere.load_backbone(run, into=module)."
        )


def called(make: Callable[[], nn.Module], name: str) -> nn.Module:
    try:
        backbone = make()
    except TypeError as error:
        raise UsageError(f"backbone: {name} could not be called without arguments: {error}") from error
    if not isinstance(backbone, nn.Module):
        raise UsageError(f"backbone: {name} gave {type(backbone).__name__}; a torch module is needed.")
    return backbone


@torch.no_grad()
def feature_dim(backbone: nn.Module, channels: int, size: int) -> int:
    """How many features the backbone gives for images of this size, found by asking it."""
    training = backbone.training
    backbone.eval()
    parameter = next(backbone.parameters(), torch.zeros(()))
    try:
        features = backbone(torch.zeros(1, channels, size, size, device=parameter.device))
    except RuntimeError as error:
        raise UsageError(f"backbone: it does not take images of {channels} x {size} x {size}: {error}") from error
    finally:
        backbone.train(training)
    if features.dim() != 2:
        raise UsageError(
            f"backbone: it gives {tuple(features.shape)} for one image; features (N, F) are needed. "
            "Pool and flatten inside the module."
        )
    return features.shape[1]
