"""Other people's trainers, used as their documentation says, with what it advises for speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.job import MAX_GRAD_NORM, Job, Sequential


def lightning(job: Job) -> None:
    """Train by Lightning's Trainer with what its guide to speed says: nothing logged or saved."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.tuned_model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            # Lightning enters autocast itself.
            return job.workload.loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.adamw(self.model, fused=True)

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            # `gradient_clip_val` refuses the fused optimizer under mixed precision; the hook, which
            # the documentation offers for clipping of one's own, has the better of both.
            clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)

    class Clock(lightning.Callback):
        def on_train_batch_end(
            self, _trainer: Any, _module: Any, outputs: Any, *_batch: Any
        ) -> None:
            job.tick(outputs["loss"])

    trainer = lightning.Trainer(
        accelerator="gpu" if job.on_cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if job.on_cuda else "32-true",
        benchmark=job.workload.channels_last,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    trainer.fit(Module(), job.loader(pinned=True))


def accelerate(job: Job) -> None:
    """Train by Accelerate's loop, with copies that do not block."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        mixed_precision="bf16" if job.on_cuda else "no",
        cpu=not job.on_cuda,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    model = job.tuned_model()
    model, optimizer, loader = accelerator.prepare(
        model, job.adamw(model, fused=True), job.loader(pinned=True)
    )
    for batch in loader:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = job.workload.loss_fn(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        job.tick(loss)


def transformers_trainer(job: Job) -> None:
    """Train a language model by the Trainer of transformers, nothing logged or saved."""
    import tempfile

    import transformers

    class LanguageModel(nn.Module):
        """The form that the Trainer asks for: named inputs, a dictionary with the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.model = job.tuned_model()
            self.last_loss = torch.zeros(())

        def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
            loss = job.workload.loss_fn(self.model, (tokens, targets))
            self.last_loss = loss.detach()
            return {"loss": loss}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return Sequential()

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.tick(model.last_loss)

    model = LanguageModel()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=10**6,
            per_device_train_batch_size=1,  # an item is a whole batch already
            optim="adamw_torch_fused",
            learning_rate=job.workload.lr,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_GRAD_NORM,
            bf16=job.on_cuda,
            use_cpu=not job.on_cuda,
            accelerator_config={"non_blocking": True},
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it reads the loss every step
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        InOrder(
            model=model,
            args=arguments,
            train_dataset=job.ready(pinned=True),
            data_collator=lambda items: {"tokens": items[0][0], "targets": items[0][1]},
            callbacks=[Clock()],
        ).train()
