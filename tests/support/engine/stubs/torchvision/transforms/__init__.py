"""STUB of ``torchvision.transforms``: the enumeration that transformers reads at import."""

from enum import Enum


class InterpolationMode(Enum):
    """Resampling filters by torchvision's own values."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
