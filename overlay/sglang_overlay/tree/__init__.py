"""Draft trees: built from a drafter's marginals, laid out for verify, walked by the target's ids.

- `marginals`  exact top-k log-probabilities per draft position from a vocab-parallel head
- `build`      the most probable prefixes of one drafter pass, as a tree
- `levels`     the same, by torch alone: what runs on a CPU
- `layout`     the tree's tensors; positions, masks and links as backends and kernels read them
- `accept`     the path from the root along the target's own choices
- `oracle`     plain Python references that the others are compared with
- `kernels`    the Triton bodies

Method: Ringel and Romano, arXiv 2604.12989.
"""
