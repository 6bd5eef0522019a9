"""STUB of ``sgl_kernel.kvcacheio``: the host cache's copy kernels, for import only."""

from typing import NoReturn


def __getattr__(name: str) -> object:
    """Give every copy kernel a stand-in that says that it is one when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} needs a GPU; this is the test stub")

    return missing
