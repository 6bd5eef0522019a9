"""STUB of ``torchvision.transforms.v2``: importable, empty."""
