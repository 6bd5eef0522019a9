"""The patch engine: takes an installed SGLang from pristine to patched and back, whole or not at all."""
