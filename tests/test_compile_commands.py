"""``python -m torchfast cache``: what it prints, removes, and exits with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from compile_receipts import make_key, make_receipt
from compile_stores import key, process
from torchfast.__main__ import main
from torchfast.compiler.receipt_files import save_receipt


@pytest.fixture
def folder(tmp_path):
    """A folder with two entries, the first used once, and a file that is not ours."""
    folder = tmp_path / "store"
    process(folder, "a", num_bytes=5000)[0].save(key("one"))
    process(folder, "a", "b", num_bytes=5000)[0].save(key("two"))
    process(folder)[0].load(key("one"))
    (folder / "notes").write_text("mine")
    return folder


@pytest.fixture
def command(folder, capsys):
    """Run a command on the folder; return its exit status and what it printed."""

    def call(name, *arguments, path=folder):
        status = main(["cache", name, os.fspath(path), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_list(command):
    status, out, err = command("list")
    one, two, both = out.splitlines()
    assert (status, err) == (0, "")
    for line, used, model in ((one, "used   1", "one"), (two, "used   0", "two")):
        assert used in line
        assert "kB" in line
        assert "torch 2.13.0  a device" in line
        assert line.endswith(f"  {model}")
    assert both.startswith("2 entries, 1")


def test_list_goes_on_after_a_bad_one(command, folder):
    damage(folder, "two", 0)
    status, out, err = command("list")
    assert status == 1
    assert "  one\n" in out
    assert key("two").name in err


def test_show(command):
    status, out, err = command("show")
    assert (status, err) == (0, "")
    assert out.count("  whole:") == 2
    assert "  artifacts inductor = 2" in out
    assert "  work model_class = one" in out
    assert "  machine device_name = a device" in out
    assert "used 1 times, last 20" in out


def test_show_one(command):
    shown = command("list")[1].split()[0]
    for begin in (shown, key("one").name, key("one").name.removeprefix("entry-")[:6]):
        status, out, _ = command("show", begin)
        assert status == 0
        assert "model_class = one" in out
        assert "model_class = two" not in out
    status, out, err = command("show", "xyz")
    assert (status, out) == (2, "")
    assert "no entry whose name begins with 'xyz'" in err


def test_show_looks_at_the_payload(command, folder):
    damage(folder, "two", -1)
    assert command("list")[0] == 0  # which does not
    status, out, err = command("show")
    assert status == 1
    assert out.count("  whole:") == 1
    assert "SHA-256" in err


def test_prune(command, folder):
    assert command("prune", "--max-bytes", "1MB")[:2] == (0, "")
    status, out, _ = command("prune", "--max-bytes", 8000)
    assert (status, out) == (0, f"removed {key('two').name}\n")
    assert not (folder / key("two").name).exists()
    assert (folder / key("one").name).exists()
    assert command("prune", "--max-bytes", "0kB")[1] == f"removed {key('one').name}\n"
    assert (folder / "notes").exists()


@pytest.mark.parametrize("text", ["-1", "much", "nan", "inf", "kB", ""])
def test_what_is_no_number_of_bytes(command, text, capsys):
    with pytest.raises(SystemExit) as ended:
        command("prune", f"--max-bytes={text}")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert (
        f"--max-bytes: must be a number of bytes, or one with kB, MB, GB or TB behind it, got "
        f"{text!r}" in said
    )


def test_clear_removes_what_is_ours_and_nothing_else(command, folder):
    others = {
        "notes": (folder / "notes").write_text,
        "entry-1.cache": (folder / "entry-1.cache").write_text,
        f"{key().name}.copy": (folder / f"{key().name}.copy").write_text,
    }
    for write in others.values():
        write("mine")
    (folder / key("a folder of this name").name).mkdir()
    (folder / f"receipt-{'0' * 12}-{'1' * 24}.json").touch()
    (folder / f".receipt-{'0' * 32}").touch()
    (folder / f".writing-{os.uname().nodename}-{'0' * 32}").touch()
    status, out, _ = command("clear")
    assert status == 0
    assert len(out.splitlines()) == 7  # entries, accounts, a receipt and leftovers
    assert set(os.listdir(folder)) == {*others, key("a folder of this name").name}


@pytest.fixture
def receipts(folder):
    """The names of two receipts in the folder, the older first."""

    def made(created, **changes):
        return save_receipt(folder, make_receipt(created=created, **changes)).name

    older = made("2026-01-01T00:00:00Z", choice="eager")
    newer = made(
        "2026-02-01T00:00:00Z", key=make_key(loss="another"), model_name=HOSTILE, notes=("a\nb",)
    )
    return older, newer


def test_list_tells_what_was_measured(command, receipts):
    status, out, err = command("list")
    *_, newer, older, total = out.splitlines()
    assert (status, err) == (0, "")
    assert newer.endswith("one\\x1b[2J\\r\\nwhole\\x9b31m\\u202eenil: blocks: default")
    assert older.startswith(receipts[0].split("-")[1][:8])
    assert "  2026-01-01T00:00:00Z  Linear: eager" in older
    assert total.endswith("; 2 receipts")


def test_show_tells_all_that_was_measured(command, receipts):
    older, newer = receipts
    status, out, err = command("show", older)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == older
    assert "Linear on" in lines[1]
    assert "eager" in lines[1]
    assert any("blocks: default" in line for line in lines)
    assert newer not in out
    assert "whole: the payload" not in out  # no entry

    status, out, err = command("show")
    assert (status, err) == (0, "")
    assert out.count("whole: the payload") == 2
    assert all(name in out for name in receipts)
    assert all(line.isprintable() for line in out.split("\n"))
    assert "  a\\nb" in out


def test_a_damaged_receipt_is_told_beside_the_others(command, folder, receipts):
    older, newer = receipts
    text = (folder / older).read_text()
    (folder / older).write_text(text.replace("eager", "ragee"))
    for name in ("list", "show"):
        status, out, err = command(name)
        assert status == 1
        assert f"{older}: its contents do not have the hash that stands in it" in err
        assert "2026-02-01T00:00:00Z" in out
    (folder / older).unlink()
    (folder / older).symlink_to(folder / newer)
    assert command("list")[0] == 1


def test_clear_of_receipts_keeps_what_was_compiled(command, folder, receipts):
    status, out, _ = command("clear", "--receipts")
    assert status == 0
    assert out.splitlines() == [f"removed {name}" for name in sorted(receipts)]
    assert command("list")[1].splitlines()[-1].startswith("2 entries, ")
    assert len(list(folder.glob("*.use"))) == 2


@pytest.mark.parametrize("name", ["list", "show", "clear", "prune"])
def test_folders_that_cannot_be_used(command, folder, tmp_path, name):
    more = ("--max-bytes", 1) if name == "prune" else ()
    status, _, err = command(name, *more, path=tmp_path / "nowhere")
    assert (status, "is not there" in err) == (2, True)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "link").symlink_to(folder)
    status, _, err = command(name, *more, path=tmp_path / "link")
    assert (status, "symbolic link" in err) == (1, True)
    folder.chmod(0o777)
    status, _, err = command(name, *more)
    assert (status, "can be written by others" in err) == (1, True)
    assert len(list(folder.glob("*.cache"))) == 2


def test_none_of_it_loads_a_compiler(folder):
    """Looking at what would be run runs none of it, nor what would."""
    code = (
        "import sys; from torchfast.__main__ import main;"
        f"main(['cache', 'show', {os.fspath(folder)!r}]);"
        "assert not [m for m in sys.modules if m.startswith(('torch._dynamo', 'torch._inductor'))]"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "whole:" in finished.stdout


def damage(folder, model, index):
    path = folder / key(model).name
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


HOSTILE = "one\x1b[2J\r\nwhole\x9b31m\u202eenil"


def test_what_is_written_in_an_entry_steers_no_terminal(command, folder):
    process(folder, "a")[0].save(key(HOSTILE, device_name=HOSTILE))
    for name, lines in (("list", 4), ("show", None)):
        status, out, err = command(name)
        assert (status, err) == (0, "")
        assert "one\\x1b[2J\\r\\nwhole\\x9b31m\\u202eenil" in out
        assert all(line.isprintable() for line in out.split("\n"))
        assert lines is None or out.count("\n") == lines
