"""Train with attention over a sliding window and with a kernel of your own, in one compiled graph.

    python examples/07_kernels_of_your_own.py [--steps N] [--device cpu|cuda]

On a GPU the window is FlexAttention's, which torch.compile makes into one kernel that skips what no
query sees, and the activation is a Triton kernel, registered with torch so that the compiler knows
what it takes and returns. Both stay in the one graph that the step is. On a CPU, where neither can
train, the same model computes the same with torch's own functions:

    step 50  loss 2.4900
    step 100  loss 0.4606
    step 150  loss 0.0269

The task is to name the token that stood 12 places ago, which only a window of at least 13 can tell.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torchfast import CompileOptions, Plan, Trainer

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without
    triton = None

LENGTH, WINDOW, BACK, NUM_TOKENS, WIDTH = 256, 64, 12, 16, 64
Batch = tuple[Tensor, Tensor]


def in_window(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < WINDOW)


def plain_squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(x, out, count, block: tl.constexpr):  # type: ignore
        at = tl.program_id(0) * block + tl.arange(0, block)
        value = tl.maximum(tl.load(x + at, mask=at < count), 0.0)
        tl.store(out + at, value * value, mask=at < count)

    # Not custom_op: of a triton_op the compiler sees the kernel inside, and what is around it.
    @torch.library.triton_op("example::squared_relu", mutates_args={})
    def squared_relu_by_triton(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 1024),)
        torch.library.wrap_triton(kernel)[grid](x, out, x.numel(), 1024)
        return out

    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2 * ctx.saved_tensors[0].clamp(min=0)

    squared_relu_by_triton.register_autograd(backward, setup_context=setup_context)


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.on_gpu = torch.device(device).type == "cuda"
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)
        # Which blocks of 128 x 128 are looked at is worked out once, not in the step.
        self.blocks: BlockMask | None = None
        at = torch.arange(LENGTH)
        waves = at[:, None] / 10 ** torch.linspace(0, 2, WIDTH // 2)
        self.register_buffer("places", torch.cat([waves.sin(), waves.cos()], 1), persistent=False)
        self.register_buffer("seen", in_window(at, at, at[:, None], at[None]), persistent=False)
        if self.on_gpu:
            self.blocks = create_block_mask(in_window, None, None, LENGTH, LENGTH, device=device)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        if self.on_gpu:
            mixed: Any = flex_attention(q, k, v, block_mask=self.blocks)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.get_buffer("seen"))
        result: Tensor = self.mix(mixed.transpose(1, 2).flatten(2))
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.get_buffer("places")
        x = x + self.attention(x)
        activation = squared_relu_by_triton if self.on_gpu else plain_squared_relu
        x = x + self.down(activation(self.up(x)))
        logits: Tensor = self.head(x)
        return logits


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens)[:, BACK:].flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of your own in a compiled step.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(args.device).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = Plan.preset("fast")
    if model.on_gpu:
        # In one piece: a break around the kernels would be an error.
        plan = plan.replace(compile=CompileOptions(regions="whole", fullgraph=True))
    with Trainer(model, optimizer, loss_fn, plan) as trainer:
        for step in range(1, args.steps + 1):
            tokens = torch.randint(NUM_TOKENS, (16, LENGTH))
            loss = trainer.step((tokens, tokens[:, :-BACK].contiguous()))
            if step % max(1, args.steps // 3) == 0:
                print(f"step {step}  loss {loss.item():.4f}")
        print(trainer.report())


if __name__ == "__main__":
    main()
