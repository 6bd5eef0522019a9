"""Triton kernel bodies. They import nothing but triton; launchers and checks live one folder up."""
