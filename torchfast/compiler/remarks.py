"""What is said of regions that run eagerly though nothing has failed."""

from __future__ import annotations

NOTHING = (
    "no graph came of it, as where its forward is kept out by torch.compiler.disable, where it is "
    "an nn.LSTM or nn.GRU, which torch.compile cannot follow, or where a graph break lies within a "
    "module of torch's own class, such as Sequential, whose frames torch leaves alone"
)
# What torch says of frames that it leaves alone, where that says little.
SKIPPED = {
    "an error was suppressed during compilation": "torch.compile cannot follow it, as it cannot "
    "nn.LSTM and nn.GRU, a ScriptModule or what torch.func transforms, or it met an error there "
    "that it was told to suppress (TORCH_LOGS=dynamo shows it)"
}
# What torch says where it found nothing to compile in a call.
NO_OPERATION = "No ops traced"
NOTHING_IN_CALL = "its calls so far had nothing to compile; it is tried again at each call"
NOTHING_AROUND = (
    "no graph came of it: what stands around the blocks is in the function with the loop over "
    "them, or compiled by somebody else; move the loop to a method of its own"
)
AT_LIMIT = (
    "the recompile limit is reached, and what differs from the calls compiled so far runs eagerly: "
    "report() names what that is; give it fewer different values, or, of sizes, dynamic=True"
)
HOOKED = (
    "global module hooks are registered, and while they are regions run eagerly: register hooks on "
    "modules instead"
)
COPIED = (
    "a shallow copy of it was called, such as nn.DataParallel makes for each device, and those run "
    "eagerly: train on several devices by DistributedDataParallel, and compile what a copy holds "
    "by a CompiledModule of its own"
)
ASKED_NO_MORE = (
    "dozens of its calls had nothing to compile, so that torch is asked no more: what differs from "
    "the calls compiled so far, such as another size, runs eagerly from now on"
)
