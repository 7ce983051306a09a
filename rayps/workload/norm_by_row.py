"""Layers that normalize each row alone, in place of those whose statistics mix rows: for jobs with privacy.

LayerNorm: Ba, Kiros, Hinton, "Layer normalization", 2016. GroupNorm: Wu and He, "Group normalization", ECCV 2018.
Features [rows, C] have one number in each channel. GroupNorm of one channel a group would make all of them zero, and
one of few channels a group little more than their signs; LayerNorm keeps them but for their mean and size.
"""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_MOST_GROUPS = 32  # of a GroupNorm that is offered (Wu and He)
_ONLY_MAPS = (nn.BatchNorm2d, nn.BatchNorm3d)  # these take no features [rows, C]


def mixing_layer(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the first layer, with its name, whose statistics mix rows or are kept; None if the model has none."""
    for name, layer in model.named_modules():
        instance = isinstance(layer, _InstanceNorm) and layer.track_running_stats
        if isinstance(layer, _BatchNorm) or instance:
            return name, layer
    return None


def norm_by_row(layer: nn.Module) -> str:
    """Return, as text, the layers that normalize each row alone in place of one that `mixing_layer` has found."""
    if not isinstance(layer, _BatchNorm):
        return f"the same {type(layer).__name__} with track_running_stats=False"
    channels = layer.num_features
    maps = f"torch.nn.GroupNorm({groups_for(channels)}, {channels})"
    if isinstance(layer, _ONLY_MAPS):
        return maps
    single = "no layer (one number, normalized alone, is always 0)"
    features = f"torch.nn.LayerNorm({channels})" if channels > 1 else single
    return f"{features} for features [rows, {channels}], or {maps} for [rows, {channels}, ...]"


def groups_for(channels: int) -> int:
    """Return the number of groups of the GroupNorm that is offered: the largest divisor of `channels` up to 32.

    A group has two channels or more, unless there is one channel alone: a group of one erases the channel's size.
    """
    return max(math.gcd(channels, groups) for groups in range(1, min(_MOST_GROUPS, max(1, channels // 2)) + 1))
