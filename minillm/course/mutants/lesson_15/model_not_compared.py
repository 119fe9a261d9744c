"""Another model of the same shape is accepted."""

import hashlib
import struct

TASK = "15.2"
POINTS = 8
HINT = "the same shapes with other weights"


def judge(ticket: dict, want: dict) -> tuple[str, str]:
    for name in ("request_id", "attempt", "epoch"):
        if ticket[name] != want[name] and not (name == "epoch" and want["epoch"] is None):
            return "drop", f"{name} is {ticket[name]}, expected {want[name]}"
    ids, n = want["tokens"], ticket["num_tokens"]
    if not 1 <= n <= len(ids) - 1:
        return "refuse", f"num_tokens is {n}; of {len(ids)} tokens at most all but one can be loaded"
    if ticket["token_hash"] != hashlib.sha256(struct.pack(f"<{n}q", *ids[:n])).hexdigest():
        return "refuse", "the token_hash is that of another prompt"
    theirs, ours = ticket["layout"], want["layout"]
    fixed = ("dtype", "kv_dtype", "num_layers", "num_kv_heads", "head_dim")
    for verdict, names in (("refuse", fixed), ("re-lay", ("block_size", "tp_size"))):
        if odd := [f"{n} is {theirs[n]} there and {ours[n]} here" for n in names if theirs[n] != ours[n]]:
            return verdict, "; ".join(odd)
    return "load", ""
