"""Lets the tests run DDP with TORCH_DISTRIBUTED_DEBUG=DETAIL, which reports mismatched collectives at once.

With torch 2.13 on gloo, DDP's own logger crashes on the process group that DETAIL wraps, so here it keeps silent.
"""

import os

if "RANK" in os.environ and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
    import torch.distributed

    for name in ("set_construction_data_and_log", "set_runtime_stats_and_log"):
        setattr(torch.distributed.Logger, name, lambda *args, **kwargs: None)
