"""Does the profiler see what is wrong? Asks it about each script, and compares with the answers.

    python -m benchmarks.slow_scripts.check --out benchmarks/results/slow_scripts.json
    python -m benchmarks.slow_scripts.check --device cpu --steps 3    # do the scripts run at all?

Each script runs under ``python -m torchfast profile`` in a process of its own. What is compared:
the class of the verdict, the line that it names, and the kind of the first finding. On
``--device cpu`` the scripts run alone, at a small size, and nothing is compared. With ``--only``
the rows of the others stay in the file, each with the run that it is from.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.slow_scripts.expected import EXPECTED, lines_of, path_of

OUTPUT_TAIL = 2000


class NoVerdictError(Exception):
    """A script failed, took too long, or the profiler wrote nothing that can be read."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a profiler names; ``line`` is None where it names no line of the script."""

    kind: str
    line: int | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a profiler says: the class of its verdict, its line, and findings, the worst first.

    ``evidence`` has the figures that its verdict goes by: how near another one is.
    """

    verdict: str
    line: int | None
    findings: tuple[Finding, ...]
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Which parts of an answer are right.

    Attributes:
        verdict: The class.
        kind: The kind of the first finding.
        line: The line that the verdict names.
        elsewhere: The right kind stands among the findings, but not first.
    """

    verdict: bool
    kind: bool
    line: bool
    elsewhere: bool

    @property
    def right(self) -> bool:
        """Whether all of it is."""
        return self.verdict and self.kind and self.line


def read_answer(written: Mapping[str, Any], script: str) -> Answer:
    """Take an answer out of what ``profile --json`` wrote.

    ``verdict`` holds a class as ``class``, a ``line``, which is ``file:line`` or None, and
    ``evidence``, numbers by name; ``findings`` hold ``kind`` and ``line``.

    Raises:
        NoVerdictError: It is something else.
    """
    try:
        verdict = written["verdict"]["class"]
        evidence = {str(name): float(v) for name, v in written["verdict"]["evidence"].items()}
        line = _line(written["verdict"], script)
        findings = tuple(
            _finding(finding, script)
            for finding in written["findings"]
            if finding["kind"] != "none"  # which stands there where nothing was found
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NoVerdictError(f"unreadable: {type(error).__name__}: {error}") from error
    return Answer(verdict=verdict, line=line, findings=findings, evidence=evidence)


def _finding(written: Mapping[str, Any], script: str) -> Finding:
    return Finding(kind=written["kind"], line=_line(written, script))


def _line(written: Mapping[str, Any], script: str) -> int | None:
    file, _, line = (written["line"] or "").rpartition(":")
    # A line of another file is no line of the script, whatever its number.
    return int(line) if Path(file).name == path_of(script).name else None


def judge(script: str, answer: Answer) -> Judgement:
    """Compare an answer with what is expected of a script."""
    expected = EXPECTED[script]
    kinds = [finding.kind for finding in answer.findings]
    verdict = answer.verdict in expected.classes
    if expected.kind == "none":
        return Judgement(verdict=verdict, kind=not kinds, line=not kinds, elsewhere=False)
    return Judgement(
        verdict=verdict,
        kind=kinds[:1] == [expected.kind],
        line=answer.line in lines_of(script),
        elsewhere=expected.kind in kinds[1:] and kinds[0] != expected.kind,
    )


def run(command: Sequence[str], limit_s: float) -> str:
    """Run a command in a process group of its own, and return what it printed.

    Raises:
        NoVerdictError: It failed, or took longer.
    """
    environment = os.environ | {"PYTHONPATH": str(results.ROOT)}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NoVerdictError(f"not done in {limit_s:.0f} s") from None
        finally:
            # Loaders and compilers outlive the one that started them.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise NoVerdictError(f"exit status {process.returncode}: {output[-OUTPUT_TAIL:]}")
    return output


def profiled(script: str, limit_s: float, keep: Path | None = None) -> Answer:
    """Ask the profiler about a script, and keep the traces and the report if a folder is given.

    Raises:
        NoVerdictError: There is no answer.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep / script
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / "profile.json"
        profile = [sys.executable, "-m", "torchfast", "profile", "--json", str(out)]
        options = ["--out", str(folder), *EXPECTED[script].options]
        run([*profile, *options, str(path_of(script))], limit_s)
        try:
            written = json.loads(out.read_text())
        except (OSError, ValueError) as error:
            raise NoVerdictError(f"no JSON was written: {error}") from error
    return read_answer(written, script)


def lacking(script: str) -> str | None:
    """Return why a script cannot run here, None if it can."""
    needs = EXPECTED[script].needs
    if needs is None or importlib.util.find_spec(needs) is not None:
        return None
    return f"{needs} is not installed"


def check(script: str, limit_s: float, keep: Path | None = None) -> dict[str, Any]:
    """Return a row of the table: what was expected, answered, and right."""
    expected = EXPECTED[script]
    row: dict[str, Any] = {"expected": {**asdict(expected), "lines": lines_of(script)}}
    started = time.monotonic()
    if (reason := lacking(script)) is not None:
        return row | {"status": "skipped", "reason": reason}
    try:
        answer = profiled(script, limit_s, keep)
    except NoVerdictError as error:
        return row | {"status": "failed", "reason": str(error)}
    judgement = judge(script, answer)
    return row | {
        "status": "right" if judgement.right else "wrong",
        "elapsed_s": round(time.monotonic() - started, 1),
        "answer": asdict(answer),
        "judgement": asdict(judgement),
    }


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Count what is right; a script that failed has nothing right, one skipped does not count."""
    asked = [row for row in rows.values() if row["status"] != "skipped"]
    judgements = [row["judgement"] for row in asked if "judgement" in row]
    parts = {part: sum(j[part] for j in judgements) for part in ("verdict", "kind", "line")}
    right = sum(row["status"] == "right" for row in asked)
    return {"scripts": len(asked), "right": right, **parts}


def show(script: str, row: Mapping[str, Any]) -> str:
    """Return one line of the printed table."""
    expected = row["expected"]
    line = f"{script:22} {row['status']:8} {expected['classes'][0]}, {expected['kind']}"
    if "judgement" not in row:
        return f"{line}: {row['reason'].splitlines()[-1]}"
    wrong = [part for part in ("verdict", "kind", "line") if not row["judgement"][part]]
    if not wrong:
        return line
    found = [f"{f['kind']} at {f['line']}" for f in row["answer"]["findings"]] or ["nothing"]
    said = f"{row['answer']['verdict']} at {row['answer']['line']}"
    return f"{line}; wrong {', '.join(wrong)}: {said}, {'; '.join(found)}"


def run_alone(script: str, steps: int, limit_s: float) -> dict[str, Any]:
    """Run a script without the profiler, on the CPU and at a small size; return how it went."""
    options = ["--device", "cpu", "--steps", str(steps), "--small"]
    if (reason := lacking(script)) is not None:
        return {"status": "skipped", "reason": reason}
    try:
        run([sys.executable, str(path_of(script)), *options], limit_s)
    except NoVerdictError as error:
        return {"status": "failed", "reason": str(error)}
    return {"status": "ran"}


def _earlier(out: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows that stand in the file: those of scripts that are not asked, or not yet."""
    earlier = results.resumed(out, {}, ignoring=["commit"]) if out else None
    return dict(earlier["rows"]) if earlier else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the scripts, print a table, write it; 1 if a script failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the table goes, as JSON")
    parser.add_argument("--only", nargs="+", choices=list(EXPECTED), default=list(EXPECTED))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a script")
    parser.add_argument("--keep", type=Path, help="a folder for the traces and reports")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=3, help="of each script, on the CPU")
    args = parser.parse_args(arguments)
    rows = _earlier(args.out) if args.device == "cuda" else {}
    for script in args.only:
        if args.device == "cuda":
            rows[script] = check(script, args.limit, args.keep) | {"run": results.this_run()}
            print(show(script, rows[script]), flush=True)
            if args.out is not None:  # after each: whoever interrupts keeps what there is
                with results.alone(args.out):
                    rows = _earlier(args.out) | {script: rows[script]}
                    ordered = {name: rows[name] for name in EXPECTED if name in rows}
                    results.write(args.out, {"summary": summary(rows), "rows": ordered})
            continue
        rows[script] = run_alone(script, args.steps, args.limit)
        print(f"{script:22} {rows[script]['status']} {rows[script].get('reason', '')}", flush=True)
    if args.device == "cuda":
        counts = summary(rows)
        parts = ", ".join(f"{part} {counts[part]}" for part in ("verdict", "kind", "line"))
        print(f"{counts['right']} of {counts['scripts']} are right in all; {parts}")
    return int(any(row["status"] == "failed" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
