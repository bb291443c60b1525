"""Receipts are found again for what they were measured for, and for nothing else."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compile_receipts import CPU, NAMES, make_key, make_receipt
from torchfast.compiler import receipt_files, receipts
from torchfast.compiler.machine import machine_of
from torchfast.compiler.receipt_files import find_receipt, save_receipt
from torchfast.compiler.receipts import CandidateResult, Receipt


def resigned(content):
    """Return the text of a receipt with a hash that fits: what no accident makes."""
    content.pop("sha256", None)
    return json.dumps({"sha256": receipts._digest(content), **content})


def test_it_goes_to_json_and_back():
    receipt = make_receipt()
    again = Receipt.from_json(receipt.to_json())
    assert again == receipt
    assert again["blocks: default"].peak_bytes == 123_000_000
    with pytest.raises(KeyError):
        again["nothing"]


def test_it_is_found_again(tmp_path):
    folder = tmp_path / "not" / "yet"
    receipt = make_receipt()
    path = save_receipt(folder, receipt)
    assert path is not None
    assert [path] == [*folder.iterdir()]  # nothing else is left there
    found = find_receipt(folder, make_key(), NAMES)
    assert found.receipt == receipt
    assert str(path) in found.reason


def test_the_table_says_what_there_is():
    text = str(make_receipt())
    rows = {line.split("  ")[1]: line for line in text.splitlines()[3:]}
    assert "not done in 60 s" in rows["whole: default"]
    assert "timed out" in rows["whole: default"]
    assert all(part in rows["blocks: default"] for part in ("21.5", "9.5-10.5", "0.800", "123"))
    assert "it is faster" in text
    assert "a note" in text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (make_key(options={"dynamic": True}), "under the options {'dynamic': None}"),
        (make_key(batch=torch.zeros(5, 2)), r"batches of float32\[4, 2\] cpu"),
        (make_key(model=nn.Linear(2, 4)), "no receipt of this model"),
        (make_key(loss="b"), "measured for another loss function"),
    ],
    ids=["options", "batch", "model", "loss"],
)
def test_what_was_measured_for_something_else_is_not_used(tmp_path, key, words):
    save_receipt(tmp_path, make_receipt())
    found = find_receipt(tmp_path, key, NAMES)
    assert found.receipt is None
    assert re.search(words, found.reason)


@pytest.mark.parametrize("name", [*machine_of(CPU)])
def test_another_machine_is_told_apart_by_each_of_its_facts(tmp_path, name):
    key = make_key()
    other = dataclasses.replace(key, machine={**key.machine, name: "another"})
    save_receipt(tmp_path, make_receipt(other))
    found = find_receipt(tmp_path, key, NAMES)
    assert found.receipt is None
    assert f"measured with {name} 'another'" in found.reason
    # Under the name of the key looked for, too: a folder that was copied, or edited.
    os.rename(tmp_path / other.file_name, tmp_path / key.file_name)
    found = find_receipt(tmp_path, key, NAMES)
    assert found.receipt is None
    assert f"measured with {name} 'another'" in found.reason


def test_a_machine_that_knows_more_of_itself_is_another():
    key = make_key()
    other = dataclasses.replace(key, machine={**key.machine, "new": "fact"})
    assert key.difference(other) is not None
    assert other.difference(key) is not None
    assert key.difference(make_key()) is None


def test_a_receipt_of_other_candidates_is_of_no_use(tmp_path):
    save_receipt(tmp_path, make_receipt())
    found = find_receipt(tmp_path, make_key(), ["eager"])
    assert found.receipt is None
    assert "it is about" in found.reason


# -- Damage ----------------------------------------------------------------------------------------


def altered(**changes):
    content = json.loads(make_receipt().to_json())
    content.update(changes)
    return resigned(content)


def with_candidate(**changes):
    content = json.loads(make_receipt().to_json())
    content["candidates"][1].update(changes)
    return resigned(content)


DAMAGED = {
    "empty": "",
    "cut": make_receipt().to_json()[:200],
    "no object": "[]",
    "a number changed": make_receipt().to_json().replace("12.5", "1.25"),
    "no hash": json.dumps({"format": 1}),
    "other format": altered(format=2),
    "no format": altered(format=None),
    "unknown part": altered(new=1),
    "choice not measured": altered(choice="whole: default"),
    "choice unknown": altered(choice="rm -rf"),
    "choice no text": altered(choice=["eager"]),
    "no candidates": altered(candidates=None),
    "candidates are numbers": altered(candidates=[1]),
    "unknown status": with_candidate(status="fine"),
    "a text for a number": with_candidate(median_ms="10"),
    "a bool for a number": with_candidate(ratio=True),
    "a number for a text": with_candidate(reason=3),
    "key": altered(key={"machine": 1, "model": "a", "batch": "b", "options": {}}),
    "NaN": make_receipt().to_json().replace("12.5", "NaN"),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_passed_over_with_its_reason(tmp_path, text):
    path = tmp_path / make_key().file_name
    path.write_text(text)
    found = find_receipt(tmp_path, make_key(), NAMES)
    assert found.receipt is None
    assert f"{path} is ignored: " in found.reason


def test_a_receipt_signed_again_without_change_is_read():
    # The control of the damage above: what is refused there is refused for the change.
    assert Receipt.from_json(altered()) == make_receipt()


@given(st.data())
def test_no_flipped_byte_gives_another_answer(data):
    receipt = make_receipt()
    text = bytearray(receipt.to_json().encode())
    position = data.draw(st.integers(0, len(text) - 1))
    text[position] ^= data.draw(st.integers(1, 255))
    try:
        found = Receipt.from_json(bytes(text).decode())
    except ValueError:
        return
    assert found == receipt  # such as other white space


def pipe(path):
    os.mkfifo(path)


def too_large(path):
    path.write_bytes(b" " * (receipt_files._MOST_BYTES + 1))


def link(path):
    path.with_name("elsewhere").write_text(make_receipt().to_json())
    path.symlink_to(path.with_name("elsewhere"))


def no_text(path):
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (pipe, "no regular file"),
        (os.mkdir, "no regular file"),
        (too_large, "a receipt at most"),
        (link, "symbolic links"),
        (no_text, "decode"),
    ],
)
@pytest.mark.timeout(20)
def test_what_is_no_file_of_ours_is_passed_over(tmp_path, plant, words):
    path = tmp_path / make_key().file_name
    plant(path)
    found = find_receipt(tmp_path, make_key(), NAMES)
    assert found.receipt is None
    assert "is ignored" in found.reason
    assert words in found.reason


@pytest.mark.parametrize("which", ["it", "its folder"])
def test_what_others_may_have_written_is_passed_over(tmp_path, which):
    path = save_receipt(tmp_path, make_receipt())
    assert find_receipt(tmp_path, make_key(), NAMES).receipt is not None
    (path if which == "it" else tmp_path).chmod(0o766)
    found = find_receipt(tmp_path, make_key(), NAMES)
    assert found.receipt is None
    assert f"{which} can be written by others (mode 766)" in found.reason
    assert (save_receipt(tmp_path, make_receipt()) is None) == (which == "its folder")


def test_no_folder_is_no_receipt(tmp_path):
    found = find_receipt(tmp_path / "none", make_key(), NAMES)
    assert found == (None, f"no receipt of this model is in {tmp_path / 'none'}")


# -- No answer -------------------------------------------------------------------------------------


def with_fates(*fates):
    """Return a receipt that chose eager, as nothing else was told to be faster."""
    others = [
        CandidateResult(name=name, **fate) for name, fate in zip(NAMES[1:], fates, strict=True)
    ]
    first = CandidateResult(name="eager", status="measured", compile_s=0.0, median_ms=12.5)
    return make_receipt(candidates=(first, *others), choice="eager")


COMPARED = {"status": "measured", "ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3}
# Of two rounds there is a ratio, and no interval.
TWO_ROUNDS = {"status": "measured", "ratio": 1.2, "ratio_low": 0.0, "ratio_high": float("inf")}
FAILED, WRONG = {"status": "failed"}, {"status": "wrong"}
TIMED_OUT, LEFT_OUT, NOT_NOW = ({"status": s} for s in ("timed out", "left out", "not now"))


@pytest.mark.parametrize("fates", [(COMPARED, LEFT_OUT), (FAILED, COMPARED), (FAILED, WRONG)])
def test_what_the_next_run_would_find_too_is_an_answer(tmp_path, fates):
    receipt = with_fates(*fates)
    assert receipt.is_answer
    assert save_receipt(tmp_path, receipt) is not None
    assert find_receipt(tmp_path, make_key(), NAMES).receipt == receipt


@pytest.mark.parametrize(
    "fates",
    [(LEFT_OUT, LEFT_OUT), (TIMED_OUT, FAILED), (TWO_ROUNDS, WRONG), (NOT_NOW, NOT_NOW)],
)
def test_what_is_no_answer_is_neither_kept_nor_used(tmp_path, fates):
    receipt = with_fates(*fates)
    assert not receipt.is_answer
    assert save_receipt(tmp_path, receipt) is None
    assert [*tmp_path.iterdir()] == []
    # As an earlier version has left it.
    path = tmp_path / make_key().file_name
    path.write_text(receipt.to_json())
    assert find_receipt(tmp_path, make_key(), NAMES) == (
        None,
        f"{path} is ignored: nothing was compared for it",
    )


# -- Writing ---------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_warned_of(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert save_receipt(tmp_path / "file" / "folder", make_receipt()) is None
    assert "could not be written" in caplog.text
    assert "another folder" in caplog.text


def test_a_write_that_fails_leaves_the_old_receipt_and_no_rest(tmp_path, monkeypatch, caplog):
    receipt = make_receipt()
    path = save_receipt(tmp_path, receipt)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert save_receipt(tmp_path, make_receipt(choice="eager")) is None
    assert [*tmp_path.iterdir()] == [path]
    assert find_receipt(tmp_path, make_key(), NAMES).receipt == receipt


def test_a_new_receipt_takes_the_place_of_the_old_one(tmp_path):
    save_receipt(tmp_path, make_receipt())
    save_receipt(tmp_path, make_receipt(choice="eager"))
    assert find_receipt(tmp_path, make_key(), NAMES).receipt.choice == "eager"
    assert len([*tmp_path.iterdir()]) == 1


def test_others_cannot_write_it(tmp_path):
    path = save_receipt(tmp_path / "new", make_receipt())
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def write_many(folder, choice):
    for _ in range(20):
        save_receipt(folder, make_receipt(choice=choice))


def test_processes_that_write_at_once_leave_a_whole_one(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_many, args=(tmp_path, choice))
        for choice in ("eager", "blocks: default")
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        found = find_receipt(tmp_path, make_key(), NAMES)
        assert found.receipt is not None or "no receipt" in found.reason
        seen.add(found.receipt and found.receipt.choice)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen - {None}
    assert len([*tmp_path.iterdir()]) == 1


def test_one_that_is_written_while_its_neighbours_are_read_is_none_of_them(tmp_path, monkeypatch):
    reads, works = [], receipt_files._read

    def read(path):
        reads.append(path)
        if len(reads) == 1:
            save_receipt(tmp_path, make_receipt())
            raise FileNotFoundError(path)
        return works(path)

    monkeypatch.setattr(receipt_files, "_read", read)
    found = find_receipt(tmp_path, make_key(), NAMES)
    assert len(reads) == 2
    assert found.receipt is None
    assert found.reason == f"no receipt of this model is in {tmp_path}"


# -- Values ----------------------------------------------------------------------------------------


def test_numbers_that_json_lacks_become_none():
    result = CandidateResult(name="a", status="wrong", loss_error=float("inf"), ratio=float("nan"))
    assert result.loss_error is None
    assert result.ratio is None
    Receipt.from_json(make_receipt(candidates=(*make_receipt().candidates, result)).to_json())


def test_options_that_json_lacks_are_refused():
    with pytest.raises(TypeError, match="options must hold only what JSON can"):
        make_key(options={"backend": print})
    with pytest.raises(TypeError, match="options must hold only what JSON can"):
        make_key(options={"timeout": float("nan")})
    one, two = make_key(options={"a": 1, "b": 2}), make_key(options={"b": 2, "a": 1})
    assert one.file_name == two.file_name
    # Tuples come back as lists: the key is in the form that it will be read in.
    assert make_key(options={"regions": ("a", "b")}) == make_key(options={"regions": ["a", "b"]})


def test_of_a_gpu_its_own_name_counts_and_not_its_index(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    machine = machine_of(torch.device("cuda:1"))
    assert machine["device"] == "NVIDIA H200"
    assert machine["capability"] == "9.0"
    assert machine == machine_of(torch.device("cuda:0"))


def test_the_machine_says_what_compiles_for_it():
    machine = machine_of(CPU)
    assert machine["torch"].startswith(torch.__version__)
    assert set(machine) >= {"device", "triton", "cuda", "python", "threads", "capability"}
    assert all(isinstance(value, str) and value for value in machine.values())


def test_the_number_formats_in_force_count():
    found = [machine_of(CPU)]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(machine_of(CPU))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    found.append(machine_of(CPU))
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(True)
    found.append(machine_of(CPU))
    torch.use_deterministic_algorithms(False)
    assert len({each["precision"] for each in found}) == 4
    assert machine_of(CPU) == found[0]
