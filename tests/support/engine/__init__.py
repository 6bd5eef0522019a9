"""The test bed: the real SGLang engine on a CPU, driven from a test; see its README.md."""
