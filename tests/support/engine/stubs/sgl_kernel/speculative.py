"""STUB: the name that SGLang's NGRAM worker imports; `tests.support.engine.ngram` replaces it."""

from typing import NoReturn


def reconstruct_indices_from_tree_mask(*args: object) -> NoReturn:
    """Fail: there is no CUDA extension here."""
    raise NotImplementedError("the test bed has not put its stand-in here")
