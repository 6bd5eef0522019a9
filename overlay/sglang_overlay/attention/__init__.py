"""Split verify: dense attention over the prefix and masked over the draft tree, merged by lse.

Exact because softmax attention over a union of disjoint sets of rows is the lse-weighted mean of
the attention over each set; only the tree's part needs a mask, and that mask is nodes × nodes bits.

- `oracle`      float64 reference that every kernel is compared with
- `mask`        packed ancestor masks, from parents or from SGLang's FULL_MASK
- `prefix`      the contract of a prefix engine
- `flashmla`    the prefix engine for sm_90 and pages of 64
- `portable`    the prefix engine for every GPU from sm_80 on
- `grouped`     prefix and tree for attention without MLA, where keys and values are apart
- `parts`       prefixes cut into parts: shares of work, partial results
- `plan`        the static buffers of one verify step
- `tree_merge`  launcher of the tree block and merge
- `adapter`     prepare once per step, attend once per layer
- `kernels`     the Triton bodies
"""
