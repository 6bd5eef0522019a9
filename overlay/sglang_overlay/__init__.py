"""The DDTree overlay for SGLang: whatever the hooks in ``patches/`` call is in this package."""

__version__ = "0.1.0"
