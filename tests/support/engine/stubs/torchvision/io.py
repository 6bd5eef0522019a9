"""STUB of ``torchvision.io``: names only."""

from enum import Enum
from typing import NoReturn


def decode_jpeg(*args: object, **kwargs: object) -> NoReturn:
    """Refuse: there is no image decoder in the stub."""
    raise NotImplementedError("torchvision is a test stub here and decodes no images")


decode_image = decode_jpeg


class ImageReadMode(Enum):
    """The one member that SGLang names."""

    RGB = 3
