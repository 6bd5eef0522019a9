"""DDTREE's server arguments: what is refused at start, and the defaults that are filled in.

SGLang looks for DFLASH's arguments by name, so a registered algorithm has to see to its own. A tree
and the drafter's block are sized apart: ``--speculative-num-draft-tokens`` counts the tokens of one
verify, the root included, ``--speculative-dflash-block-size`` those of the drafter's pass.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from sglang_overlay import upstream

logger = logging.getLogger(__name__)

DEFAULT_TREE_SIZE = 32
DEFAULT_BLOCK_SIZE = 16
DEFAULT_RUNNING_REQUESTS = 48
MAX_TREE_SIZE = 256
# The backends whose verify of a tree was built and tested; others honour masks on paper.
BACKENDS = ("triton", "flashmla")


class UnsupportedServerError(ValueError):
    """The server asks for something together with DDTREE that the two cannot do."""


def complete(server_args: Any) -> None:
    """Fill in DDTREE's defaults in ``server_args``, once everything in them is possible.

    Raises:
        UnsupportedServerError: what DDTREE cannot do was asked for, or a size does not fit.
    """
    found = obstacles(server_args)
    if found:
        raise UnsupportedServerError(f"DDTREE cannot run on this server: {'; '.join(found)}")
    server_args.speculative_dflash_block_size = block_size(server_args)
    _complete_tree_size(server_args)
    _check_draft_window(server_args)
    # EAGLE's units, which buffers and accounting still multiply with.
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = 1
    if server_args.max_running_requests is None:
        server_args.max_running_requests = DEFAULT_RUNNING_REQUESTS
        logger.warning(
            "DDTREE: --max-running-requests is not set and becomes %d", DEFAULT_RUNNING_REQUESTS
        )
    server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    logger.info(
        "DDTREE: trees of %d tokens from blocks of %d; overlap scheduling and mixed chunked "
        "prefill are off",
        server_args.speculative_num_draft_tokens,
        server_args.speculative_dflash_block_size,
    )


def obstacles(server_args: Any) -> tuple[str, ...]:
    """Return every reason why DDTREE cannot run under ``server_args``, sizes apart."""
    backend, chosen_by = upstream.verify_backend_name(server_args)
    asked = [
        (
            server_args.speculative_draft_model_path is None,
            "a drafter is missing: set --speculative-draft-model-path to a DFlash drafter",
        ),
        (server_args.enable_dp_attention, "drop --enable-dp-attention"),
        (server_args.pp_size != 1, f"--pp-size is {server_args.pp_size}: set it to 1"),
        (
            server_args.enable_deterministic_inference,
            "drop --enable-deterministic-inference: the reductions of a verify depend on its tree",
        ),
        (
            server_args.enable_two_batch_overlap,
            "drop --enable-two-batch-overlap, which splits a verify",
        ),
        (server_args.enable_pdmux, "drop --enable-pdmux"),
        (
            server_args.disaggregation_mode != "null",
            f"--disaggregation-mode {server_args.disaggregation_mode} hands requests over without "
            "the drafter's state: drop it",
        ),
        (
            server_args.enable_return_routed_experts,
            "drop --enable-return-routed-experts, which keeps experts by a node's slot where the "
            "commit moves rows, and has no room for a batch of trees",
        ),
        (
            backend not in BACKENDS,
            f"target verify would run on {backend} ({chosen_by}): choose {' or '.join(BACKENDS)}",
        ),
    ]
    return tuple(reason for holds, reason in asked if holds) + model_obstacles(server_args)


def model_obstacles(server_args: Any) -> tuple[str, ...]:
    """Return why DDTREE cannot verify the target's architecture, as its configuration shows it."""
    from sglang.srt.configs.model_config import is_deepseek_nsa

    config = server_args.get_model_config()
    found = []
    if is_deepseek_nsa(config.hf_config):
        found.append(
            "the target has sparse attention (DeepSeek V3.2's NSA), whose kernels take no mask"
        )
    if config.is_hybrid_swa:
        found.append(
            "the target has sliding-window layers, whose kernels count rows of the tree as "
            "positions"
        )
    return tuple(found)


def check_runner(model_runner: Any) -> None:
    """Check what only the target's objects show.

    Raises:
        UnsupportedServerError: DDTREE cannot verify on the target's ``model_runner``.
    """
    found = runner_obstacles(model_runner)
    if found:
        raise UnsupportedServerError(f"DDTREE cannot run on this server: {'; '.join(found)}")


def runner_obstacles(model_runner: Any) -> tuple[str, ...]:
    """Return why DDTREE cannot verify on the target's ``model_runner``, as its objects show it."""
    found = []
    if model_runner.sliding_window_size is not None:
        found.append(
            f"the target attends within a window of {model_runner.sliding_window_size} tokens, and "
            "its kernels count rows of the tree as positions"
        )
    if model_runner.mambaish_config is not None:
        found.append("the target has recurrent layers, whose state can only follow a chain")
    return tuple(found)


def block_size(server_args: Any) -> int:
    """Return the drafter's block size, in tokens with the root: asked for, or its config's.

    Raises:
        UnsupportedServerError: it is below 2: the drafter would draft nothing.
    """
    asked = server_args.speculative_dflash_block_size
    size = int(asked) if asked is not None else _configured_block_size(server_args)
    if size < 2:
        raise UnsupportedServerError(
            f"--speculative-dflash-block-size: got {size}, needed at least 2: the root and one "
            "drafted token"
        )
    return size


def _configured_block_size(server_args: Any) -> int:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    size = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    if size is None:
        logger.warning(
            "DDTREE: the drafter's configuration has no block_size; %d is taken. Set "
            "--speculative-dflash-block-size if it was trained with another.",
            DEFAULT_BLOCK_SIZE,
        )
        return DEFAULT_BLOCK_SIZE
    return int(size)


def _complete_tree_size(server_args: Any) -> None:
    block = server_args.speculative_dflash_block_size
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = max(DEFAULT_TREE_SIZE, block)
        logger.info(
            "DDTREE: --speculative-num-draft-tokens is not set and becomes %d",
            server_args.speculative_num_draft_tokens,
        )
    tree = int(server_args.speculative_num_draft_tokens)
    # The pools reserve room behind a request by the tree's size, and the drafter's block uses it.
    if tree < block:
        raise UnsupportedServerError(
            f"--speculative-num-draft-tokens: got {tree}, needed at least the drafter's block of "
            f"{block}; raise it, or lower --speculative-dflash-block-size"
        )
    if tree > MAX_TREE_SIZE:
        raise UnsupportedServerError(
            f"--speculative-num-draft-tokens: got {tree}, needed at most {MAX_TREE_SIZE}"
        )


def _check_draft_window(server_args: Any) -> None:
    window, block = (
        server_args.speculative_draft_window_size,
        server_args.speculative_dflash_block_size,
    )
    if window is not None and int(window) < block:
        raise UnsupportedServerError(
            f"--speculative-draft-window-size: got {window}, needed at least the drafter's block "
            f"of {block}"
        )
