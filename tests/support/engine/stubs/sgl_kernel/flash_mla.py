"""STUB of ``sgl_kernel.flash_mla``: its call surface over reference attention."""

from tests.support.engine.reference import flash_mla_with_kvcache, get_mla_metadata

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]
