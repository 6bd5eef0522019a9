"""The DDTree overlay for SGLang: what the hooks in ``patches/`` call lives in this package."""

__version__ = "0.1.0"
