"""Capture a training step of your own into one CUDA graph: model, optimizer, an average, metrics.

    python examples/04_any_step_in_one_graph.py [--steps N] [--device cpu|cuda]

The step is a plain function. It trains a small network, and after each update moves an average of
its weights (EMA) a little towards them, all on the device. (A Trainer has that as an option; here
it stands for what your own step does.) On a GPU a CUDAGraphStep replays it all with one launch; on
a CPU, which has no graphs, the function runs as it is:

    no graphs on a CPU: the step runs as it is
    step 200  loss 0.2909  accuracy 0.871
    step 400  loss 0.2494  accuracy 0.895
    step 600  loss 0.1780  accuracy 0.945
    held-out accuracy: 0.900 of the weights, 0.922 of their average
    1.07 ms a step
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfast import CUDAGraphStep

BATCH = 256
Metrics = dict[str, Tensor]


def make_data(num_samples: int, device: str) -> tuple[Tensor, Tensor]:
    """Return points in 20 dimensions, labelled by a random network."""
    generator = torch.Generator().manual_seed(1)
    teacher = [torch.randn(shape, generator=generator) for shape in ((20, 16), (16, 4))]
    inputs = torch.randn(num_samples, 20)
    labels = (torch.tanh(0.3 * inputs @ teacher[0]) @ teacher[1]).argmax(1)
    return inputs.to(device), labels.to(device)


@torch.no_grad()
def accuracy_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    model.eval()
    correct: Tensor = model(data[0]).argmax(1) == data[1]
    model.train()
    return correct.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with a step of one's own in a CUDA graph.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)

    inputs, labels = make_data(65_536, args.device)
    held_out = make_data(8192, args.device)
    layers = (nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
    model = nn.Sequential(*layers).to(args.device)
    averaged = copy.deepcopy(model).requires_grad_(False)
    # fused=True: its update can be in a graph without a change of one bit.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
    weights: list[Tensor] = [*model.parameters()]
    averages: list[Tensor] = [*averaged.parameters()]

    def train_step(inputs: Tensor, labels: Tensor) -> Metrics:
        """Update the weights and their average; read nothing on the host."""
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 0.02)
        return {
            "loss": loss.detach(),
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }

    step: Callable[[Tensor, Tensor], Metrics] = train_step
    if torch.device(args.device).type == "cuda":
        # All that the step reads or changes is named: it is watched, compared and put back.
        step = CUDAGraphStep(train_step, state=[model, averaged, optimizer])
    else:
        print("no graphs on a CPU: the step runs as it is")

    started = time.perf_counter()
    for number in range(1, args.steps + 1):
        chosen = torch.randint(len(inputs), (BATCH,), device=args.device)
        metrics = step(inputs[chosen], labels[chosen])
        scheduler.step()  # outside: the graph reads the new learning rate
        if number % max(1, args.steps // 3) == 0:
            values = {name: value.item() for name, value in metrics.items()}
            print(f"step {number}  loss {values['loss']:.4f}  accuracy {values['accuracy']:.3f}")
    step_ms = (time.perf_counter() - started) / args.steps * 1e3

    if isinstance(step, CUDAGraphStep):
        print(step.report())
        step.close()
    found = accuracy_of(model, held_out), accuracy_of(averaged, held_out)
    print(f"held-out accuracy: {found[0]:.3f} of the weights, {found[1]:.3f} of their average")
    print(f"{step_ms:.2f} ms a step")


if __name__ == "__main__":
    main()
