"""The FlashMLA hooks import SGLang's kernel package, for which its stub stands in here."""

import os
import sys
from pathlib import Path

STUBS = Path(__file__).parents[2] / "support" / "engine" / "stubs"

# Other tests run Triton's kernels in the interpreter, which is chosen when triton is imported.
if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(STUBS))
try:
    import sgl_kernel.flash_mla  # noqa: F401
finally:
    sys.path.remove(str(STUBS))
