"""KV slots: where tokens lie, where new ones go, how rows move, what to bring together.

- `metrics`    what a layout is like
- `pool_map`   a pool as a picture
- `levels`     how far the overlay goes on a server
- `free_map`   which units are free
- `placement`  which free units new tokens get
- `planner`    which cached pieces to move where
- `rows`       the buffers of a pool, as rows that can be moved
- `mover`      copy rows to other slots, in all buffers by one launch
- `move_list`  the rules of a list of moves, where they can be checked
- `kernels`    the Triton bodies

Layouts count in *units*: slots where a page is one slot, pages elsewhere. A *run* is a stretch of
tokens in consecutive units.
"""
