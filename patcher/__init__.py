"""The patch engine: takes an installed SGLang from pristine to patched and back, or not at all."""
