"""Receipts: what was measured of ways to compile, kept for the next run.

A search takes as long as its compiles do, and its answer is the same the next time: for this model
and loss, batches like these, these options, on this machine, under this torch. So the answer is
written down beside the compile cache, as JSON, under a name made of all that it depends on
(`ReceiptKey`), by `torchfast.compiler.receipt_files`. The next run finds it and measures nothing.

A receipt holds names and numbers, never code. What is read back chooses among the candidates that
the caller has anyway; a name that is not among them chooses nothing.

Only an answer is written down. Where the time was used up before anything was compared, or the
compiler was switched off, the next run has to search again (`Receipt.is_answer`).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
from torch import nn

from torchfast._core.fingerprint import batch_signature, model_fingerprint
from torchfast._core.shell import one_line
from torchfast.compiler.machine import machine_of

logger = logging.getLogger(__name__)

FORMAT: Final = 4
Status = Literal["measured", "failed", "timed out", "wrong", "left out", "not now"]

_STATUSES: Final = ("measured", "failed", "timed out", "wrong", "left out", "not now")
# What the next run would find, too, however much time it had.
_FOR_GOOD: Final = ("failed", "wrong")


@final
@dataclass(frozen=True, kw_only=True)
class ReceiptKey:
    """What an answer depends on.

    Attributes:
        machine: The device, torch and what compiles for it.
        model: Its `model_fingerprint`.
        batch: Its `batch_signature`.
        options: What the search was asked for, JSON-ready.
        loss: The `function_fingerprint` of what computes the loss; empty where none does.
    """

    machine: Mapping[str, str]
    model: str
    batch: str
    options: Mapping[str, Any]
    loss: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: object,
        device: torch.device,
        options: Mapping[str, Any],
        *,
        loss: str = "",
    ) -> ReceiptKey:
        """Return the key of a model and a batch on this machine.

        Raises:
            TypeError: ``options`` hold what JSON cannot.
        """
        try:
            plain = json.loads(json.dumps(dict(options), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"options must hold only what JSON can (numbers, strings, lists, dicts), got "
                f"{dict(options)!r}: {error}"
            ) from error
        return cls(
            machine=machine_of(device),
            model=model_fingerprint(model),
            batch=batch_signature(batch),
            options=plain,
            loss=loss,
        )

    @property
    def file_name(self) -> str:
        """The name of the file: the model, so that neighbours are found, and all of it."""
        return f"{self.neighbours}{_digest(dataclasses.asdict(self))[:24]}.json"

    @property
    def neighbours(self) -> str:
        """How the names of the files of all receipts of this model begin."""
        return f"receipt-{self.model[:12]}-"

    def difference(self, other: ReceiptKey) -> str | None:
        """Return in words in what another key differs; None if it does not."""
        for name, value in self.machine.items():
            if other.machine.get(name) != value:
                return f"measured with {name} {other.machine.get(name)!r}, this is {value!r}"
        if dict(self.machine) != dict(other.machine):
            return f"measured on a machine that says {sorted(other.machine)} of itself"
        if self.model != other.model:
            return "measured for another model"
        if self.loss != other.loss:
            return "measured for another loss function"
        if self.batch != other.batch:
            return f"measured for batches of {other.batch[:200]}, these are {self.batch[:200]}"
        if dict(self.options) != dict(other.options):
            return f"measured under the options {dict(other.options)}, not {dict(self.options)}"
        return None


@final
@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """What became of one candidate.

    Attributes:
        name: Its name.
        status: ``"measured"``, ``"failed"`` (it raised), ``"timed out"``, ``"wrong"`` (off the
            reference by more than its tolerance), ``"left out"`` (no time was left) or
            ``"not now"`` (something keeps torch from compiling at the moment).
        reason: Why it was not measured, or what else there is to say.
        compile_s: Seconds until its first unit of work was done and nothing was compiled any more.
        median_ms: The median of a unit.
        low_ms: The lower quartile.
        high_ms: The upper quartile.
        ratio: Its time over the reference's.
        ratio_low: The lower bound of that.
        ratio_high: The upper bound.
        peak_bytes: The most that tensors held on the device during a unit.
        loss_error: How far its loss is off the reference's, relatively.
        gradient_error: How far its gradients are, relatively.
        is_replayed: Whether replays of a graph were timed, and not kernels launched one by one.
    """

    name: str
    status: Status
    reason: str = ""
    compile_s: float | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_bytes: int | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    is_replayed: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                # JSON has no such numbers; the reason says what there was.
                object.__setattr__(self, field.name, None)

    @property
    def is_compared(self) -> bool:
        """Whether it was timed beside the reference, often enough to tell anything."""
        return self.status == "measured" and self.ratio_high is not None


@final
@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a search measured, and what it chose.

    Attributes:
        key: What the answer depends on.
        model_name: The class of the model, for people.
        candidates: In the order in which they were given, the reference first.
        choice: The name of the one to take.
        why: The reason, in words.
        notes: What else a reader should know: what was left out, what could not be judged.
        budget_s: The time that there was.
        elapsed_s: The time that it took.
        created: The date, UTC.
    """

    key: ReceiptKey
    model_name: str
    candidates: tuple[CandidateResult, ...]
    choice: str
    why: str
    notes: tuple[str, ...]
    budget_s: float
    elapsed_s: float
    created: str

    def __getitem__(self, name: str) -> CandidateResult:
        """Return the result of a candidate."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    @property
    def is_answer(self) -> bool:
        """Whether it says which is the fastest, and not only that nobody could find out."""
        reference, *others = self.candidates
        return (
            self.choice != reference.name
            or any(other.is_compared for other in others)
            or all(other.status in _FOR_GOOD for other in others)
        )

    def to_json(self) -> str:
        """Return the receipt as a file's contents, with a hash against damage."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps({"sha256": _digest(content), **content}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """Return what `to_json` wrote.

        Raises:
            ValueError: It is damaged, or of another format.
        """
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply for a receipt") from error
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, a receipt is an object")
        if content.get("format") != FORMAT:
            raise ValueError(
                f"its format is {content.get('format')!r}, this version reads {FORMAT}"
            )
        told = content.pop("sha256", None)
        if told != _digest(content):
            raise ValueError("its contents do not have the hash that stands in it")
        del content["format"]
        try:
            content["key"] = ReceiptKey(**content["key"])
            content["candidates"] = tuple(CandidateResult(**c) for c in content["candidates"])
            content["notes"] = tuple(content["notes"])
            receipt = cls(**content)
        except (KeyError, TypeError) as error:
            raise ValueError(f"its parts are not those of a receipt ({error})") from error
        receipt._check()
        return receipt

    def _check(self) -> None:
        """Raise ValueError if a part is not what its type says."""
        key = self.key
        texts = [self.model_name, self.choice, self.why, self.created, *self.notes]
        texts += [key.model, key.batch, key.loss]
        numbers: list[Any] = [self.budget_s, self.elapsed_s]
        for candidate in self.candidates:
            texts += [candidate.name, candidate.reason]
            given = dataclasses.asdict(candidate)
            if not isinstance(given.pop("is_replayed"), bool):
                raise ValueError("one of its flags is none")
            measured = (given[n] for n in given if n not in ("name", "status", "reason"))
            numbers += [value for value in measured if value is not None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("one of its texts is none")
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise ValueError("one of its numbers is none")
        if not isinstance(key.machine, dict) or not isinstance(key.options, dict):
            raise ValueError("its key is none")
        if any(candidate.status not in _STATUSES for candidate in self.candidates):
            raise ValueError("one of its candidates has a status that does not exist")
        if self.choice not in [c.name for c in self.candidates if c.status == "measured"]:
            raise ValueError(f"its choice {self.choice!r} is none of what it measured")

    def __str__(self) -> str:
        """Return the receipt as a table for a person."""
        machine = self.key.machine
        lines = [
            f"{self.model_name} on {machine.get('device')}, torch {machine.get('torch')}, "
            f"{self.created}: {self.choice}",
            f"  {self.why}",
        ]
        rows: list[tuple[str, ...]] = [
            ("", "compile s", "ms", "quartiles", "ratio", "peak MB", "loss off", "grad off")
        ]
        rows += [_row(candidate) for candidate in self.candidates]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row, candidate in zip(rows, (None, *self.candidates), strict=True):
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[0] = row[0].ljust(widths[0])
            said = ""
            if candidate is not None:
                said = "" if candidate.status == "measured" else candidate.status
                said = ": ".join(filter(None, (said, candidate.reason)))
            lines.append("  " + "  ".join([*cells, said]).rstrip())
        # Of what a file says, or an error of several lines, each stays a part of its own line.
        return "\n".join(map(one_line, [*lines, *(f"  {note}" for note in self.notes)]))


def new_date() -> str:
    """Return the time now, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _row(candidate: CandidateResult) -> tuple[str, ...]:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    quartiles = ""
    if candidate.low_ms is not None and candidate.high_ms is not None:
        quartiles = f"{candidate.low_ms:.4g}-{candidate.high_ms:.4g}"
    peak = None if candidate.peak_bytes is None else candidate.peak_bytes / 1e6
    return (
        candidate.name,
        cell(candidate.compile_s, ".1f"),
        cell(candidate.median_ms, ".4g"),
        quartiles,
        cell(candidate.ratio, ".3f"),
        cell(peak, ".0f"),
        cell(candidate.loss_error, ".1g"),
        cell(candidate.gradient_error, ".1g"),
    )
