"""STUB of ``torchvision``: SGLang imports it for image models, which these tests do not run."""

__version__ = "0.0"
