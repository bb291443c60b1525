"""Trains a small GPT-2 with the Trainer of transformers and a callback that keeps its gradients."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset

try:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ImportError:
    raise SystemExit("this script needs transformers: pip install transformers") from None


class Texts(Dataset):
    def __init__(self, count, length, vocabulary):
        self.tokens = torch.randint(vocabulary, (count, length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class GradientLog(TrainerCallback):
    """Keeps the largest weight and gradient of each layer, to find where training goes astray."""

    def __init__(self):
        self.rows = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        row = {"step": state.global_step}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                row[name] = parameter.grad.abs().max().item()  # <- here
                row[f"{name}, weight"] = parameter.detach().abs().max().item()  # <- here
        self.rows.append(row)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    width, layers, batch, length = (64, 2, 2, 16) if args.small else (512, 12, 128, 256)
    config = GPT2Config(
        vocab_size=4096,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    log = GradientLog()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=batch,
            bf16=True,
            use_cpu=args.device == "cpu",
            optim="adamw_torch_fused",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=args.device != "cpu",
        )
        texts = Texts(batch * args.steps, length, 4096)
        model = GPT2LMHeadModel(config)
        trainer = Trainer(model, settings, train_dataset=texts, callbacks=[log])
        result = trainer.train()
    print(f"loss {result.training_loss:.3f} after {result.global_step} steps, {len(log.rows)} rows")


if __name__ == "__main__":
    main()
