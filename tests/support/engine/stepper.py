"""SGLang's real ``Scheduler`` in this process, stepped by hand, with every pool in reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Stepper:
    """A scheduler with its workers, pools and cache. Import of SGLang happens here, not before.

    ``rank`` is the tensor-parallel one: each rank is a process that steps for itself, and all must
    be told the same.
    """

    def __init__(self, arguments: dict[str, Any], *, rank: int = 0) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        server_args = ServerArgs(**arguments)
        ports = PortArgs.init_new(server_args)
        # gpu id, then the ranks for tensor, expert, pipeline, context and data parallelism.
        self.scheduler: Any = Scheduler(server_args, ports, rank, rank, 0, 0, 0, 0, None)
        self._submitted = 0

    def submit(
        self,
        prompt: Sequence[int],
        *,
        tokens: int,
        asked: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Any:
        """Queue a greedy request for ``tokens`` new tokens; return SGLang's own ``Req``.

        ``asked`` are further fields of the request as it comes in, ``sampling`` further sampling
        parameters, or others in place of the greedy ones.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        wanted = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        params = SamplingParams(**wanted)
        params.normalize(self.scheduler.tokenizer)
        self._submitted += 1
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"request-{self._submitted}",
                input_text="",
                input_ids=list(prompt),
                mm_inputs=None,
                sampling_params=params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                **(asked or {}),
            )
        )
        return self.scheduler.waiting_queue[-1]

    def step(self) -> str:
        """Run one round of the scheduler's normal loop, checks included.

        Returns the forward mode of the batch as it was scheduled (``EXTEND``, ``DECODE``), or an
        empty string when there was nothing to run.
        """
        scheduler = self.scheduler
        with torch.inference_mode():
            batch = scheduler.get_next_batch_to_run()
            scheduler.cur_batch = batch
            mode = ""
            if batch:
                mode = str(batch.forward_mode.name)
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            else:
                scheduler.on_idle()
            scheduler.last_batch = batch
            scheduler.self_check_during_busy()
        return mode

    def run(self) -> int:
        """Step until nothing is left to do; return the number of batches run."""
        batches = 0
        while self.step():
            batches += 1
        return batches

    def free_slots(self) -> int:
        """Return the slots that hold nothing, or only what the radix cache may drop."""
        allocator, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        return int(allocator.available_size() + cache.evictable_size())
