"""Moving rows of a KV cache between slots.

- `rows`       the buffers of a pool, as rows that can be moved
- `mover`      copy rows to other slots, in all buffers by one launch
- `move_list`  the rules of a list of moves, where they can be checked
- `kernels`    the Triton bodies
"""
