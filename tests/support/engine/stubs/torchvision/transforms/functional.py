"""STUB of ``torchvision.transforms.functional``: names only."""

from . import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]

pil_to_tensor = None
