"""Trains a residual network with Lightning and counts the hits of every class."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning
except ImportError:
    raise SystemExit("this script needs lightning: pip install lightning") from None


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


class Classifier(lightning.LightningModule):
    def __init__(self, width, depth, classes):
        super().__init__()
        self.classes = classes
        self.hits = [0] * classes
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 4, 4),
            *(Residual(width) for _ in range(depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )

    def training_step(self, batch):
        images, labels = batch
        logits = self.network(images.contiguous(memory_format=torch.channels_last))
        predicted = logits.argmax(1)
        for i in range(self.classes):
            self.hits[i] += ((predicted == i) & (labels == i)).sum().item()  # <- here
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, fused=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    lightning.seed_everything(0, verbose=False)
    size, width, depth, batch, classes = (16, 8, 1, 2, 4) if args.small else (64, 768, 8, 224, 100)
    images = torch.randn(batch * 4, 3, size, size).repeat(-(-args.steps // 4), 1, 1, 1)
    labels = torch.randint(classes, (len(images),))
    loader = DataLoader(TensorDataset(images, labels), batch, pin_memory=args.device != "cpu")
    model = Classifier(width, depth, classes).to(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu" if args.device == "cpu" else "gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=args.steps,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
    print(f"{sum(model.hits)} hits after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
