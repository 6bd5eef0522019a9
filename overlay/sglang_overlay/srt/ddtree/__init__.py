"""DDTREE: draft trees from one pass of a DFlash drafter, verified and committed exactly.

The method is that of Ringel and Romano, arXiv 2604.12989. The mathematics is in ``tree/``; here is
how SGLang is made to run it. `registration` and `validation` are imported by every process and
import neither torch nor SGLang; `worker` is imported where a worker is made.
"""

NAME = "DDTREE"
