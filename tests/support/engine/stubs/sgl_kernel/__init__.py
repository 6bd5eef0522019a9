"""STUB of the ``sgl_kernel`` CUDA extension, for machines without its hardware. Tests only.

It offers just the names that SGLang imports on the paths under test. A name that is missing here
fails at import, in the open: there is no catch-all.
"""

__version__ = "0.4.2.post2"
