"""The FlashMLA hooks import SGLang's kernel package; where it is absent, its stub stands in."""

import importlib.util
import os
import sys
from pathlib import Path

STUBS = Path(__file__).parents[2] / "support" / "engine" / "stubs"

# Other tests run Triton's kernels in the interpreter, which is chosen when triton is imported.
if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("sgl_kernel") is None:
    sys.path.insert(0, str(STUBS))
    try:
        import sgl_kernel.flash_mla  # noqa: F401
    finally:
        sys.path.remove(str(STUBS))
