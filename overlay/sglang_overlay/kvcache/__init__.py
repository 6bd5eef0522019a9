"""KV slots: where tokens lie, where new ones go, how scattered ones are brought together.

`metrics` measures a layout, `placement` chooses slots for new tokens, `planner` says what to move.
Everything counts in *units*: slots where a page is one slot, pages elsewhere. A *run* is a stretch
of tokens in consecutive units.
"""
