"""Merges random bad, or odd but legal, inputs: each must end in a clear error or in a right result.

    python benchmarks/bad_inputs.py --count 10000
    python benchmarks/bad_inputs.py --kind tensors --seed 4711 --count 1   # one case again

A clear error is one that this package raises itself, of a class that its docstrings name. A right result is a finite
model with the tensors of the pretrained one, or of the first expert; where it is known, just the model that undamaged
input gives. Nothing else may come of a case: no error out of torch or of a file format, no hang, and no temporary or
half-written file.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import functools
import gc
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import safetensors.torch
import torch
from bad_input_kinds.calibration import CALIBRATION_KINDS
from bad_input_kinds.experts import EXPERT_KINDS
from bad_input_kinds.files import FILE_KINDS
from bad_input_kinds.modules import MODULE_KINDS
from bad_input_kinds.networks import Attempt, Kind, OnPurpose, generator_of
from bad_input_kinds.settings import SETTING_KINDS
from safetensors import SafetensorError
from torch import nn
from tqdm.auto import tqdm

import fusion_bench_crossmean
from fusion_bench_crossmean.forwards import WalkError
from fusion_bench_crossmean.method import running

KINDS: dict[str, Kind] = {**SETTING_KINDS, **EXPERT_KINDS, **MODULE_KINDS, **CALIBRATION_KINDS, **FILE_KINDS}
#: Seconds that a case may take; an undisturbed merge takes a twentieth of one.
LIMIT = 20
#: Classes of errors that the package documents.
DOCUMENTED = (ValueError, TypeError, OSError, MemoryError, ArithmeticError, WalkError)
PACKAGE = Path(fusion_bench_crossmean.__file__).parent
#: What becomes of a case.
RIGHT, CLEAR, REFUSED, FAILED = "right results", "clear errors", "refused by the loader", "failures"
NUM_SHOWN = 10
#: The names that `report.written_whole` gives to files that are not whole yet.
HALF_WRITTEN = re.compile(r"^\..*\.\w{8}(\.|$)")


class HangError(BaseException):
    """A case takes too long; not an `Exception`, which code under test might catch."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case, and in words why."""

    verdict: str
    reason: str = ""


def run_case(kind: str, seed: int, root: Path) -> Outcome:
    """Makes one case and runs it, in a folder of its own below `root`."""
    folder, temporary = root / "case", root / "tmp"
    for place in (folder, temporary):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    inside = folder / "a" / "b"  # a '..' or two stay within the case
    inside.mkdir(parents=True)
    with inputs_from(seed, inside, temporary):
        attempt = KINDS[kind](generator_of(kind, seed), inside)
        before = stamps(folder)
        outcome = classify(attempt)
        if outcome.verdict != FAILED and (wrong := left_behind(folder, temporary, before)):
            outcome = Outcome(FAILED, f"{wrong} ({outcome.verdict}: {outcome.reason})")
    return Outcome(outcome.verdict, f"{attempt.about}: {outcome.reason}")


def classify(attempt: Attempt) -> Outcome:
    """Runs an attempt and says what became of it."""
    signal.alarm(LIMIT)
    try:
        merged = attempt.run()
        wrong = wrong_result(merged, attempt)
    except HangError as error:
        return Outcome(FAILED, f"a hang: {innermost(error)}")
    except OnPurpose:
        return Outcome(CLEAR)  # the user's own error comes through as it is
    except Exception as error:  # noqa: BLE001  (the one place where any error is judged, whatever it is)
        return judge(error)
    finally:
        signal.alarm(0)
    return Outcome(FAILED, wrong) if wrong else Outcome(RIGHT)


def judge(error: Exception) -> Outcome:
    """Whether the package raised an error itself; those of FusionBench's loader are not its own."""
    frames = traceback.extract_tb(error.__traceback__)
    words = f"{type(error).__name__}: {str(error)[:300]} [{innermost(error)}]"
    if any(frame.name == "load_model" and PACKAGE not in Path(frame.filename).parents for frame in frames):
        return Outcome(REFUSED, words)
    last = frames[-1]
    is_own = last.lineno in raising_lines().get(last.filename, ())
    if isinstance(error, DOCUMENTED) and is_own and str(error).strip():
        return Outcome(CLEAR, words)
    return Outcome(FAILED, words)


@functools.cache
def raising_lines() -> dict[str, set[int]]:
    """The lines of every module's `raise` statements: an error from another line is not said in the package's words."""
    found: dict[str, set[int]] = {}
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        raises = [node for node in nodes if isinstance(node, ast.Raise)]
        found[str(path)] = {line for node in raises for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return found


def innermost(error: BaseException) -> str:
    """The last place in the package that an error came through, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    return " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (frames[-1], *own[-1:]))


def wrong_result(merged: Any, attempt: Attempt) -> str:
    """In words: what is wrong with a result; empty where nothing is."""
    if merged is None:
        return "" if attempt.may_be_none else "no model, and no error"
    if not isinstance(merged, nn.Module):
        return f"a {type(merged).__name__} instead of a model"
    if attempt.like is None:
        return "a model of experts that cannot be merged"
    state, like = merged.state_dict(), attempt.like.state_dict()
    if state.keys() != like.keys():
        return f"other keys: {sorted(map(str, state.keys() ^ like.keys()))[:3]}"
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_meta or tensor.shape != like[key].shape:
            return f"{key} is on {tensor.device} in the shape {tuple(tensor.shape)}, not {tuple(like[key].shape)}"
        if not tensor.isfinite().all():
            return f"{key} is not finite"
        if attempt.exactly is not None and not torch.equal(tensor, attempt.exactly[key]):
            return f"{key} is not what undamaged input gives"
    return ""


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every entry below a folder, with what changes when it is written."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in folder.rglob("*")}


def left_behind(folder: Path, temporary: Path, before: dict[Path, tuple[int, int]]) -> str:
    """In words: a temporary file that is left, or one that was written and is not whole; empty where there is none."""
    if left := list(temporary.iterdir()):
        return f"a temporary file is left: {left[0].name}"
    for path, stamp in stamps(folder).items():
        if before.get(path) == stamp or not path.is_file():
            continue
        if HALF_WRITTEN.search(path.name):
            return f"a half-written file is left: {path.name}"
        try:
            if path.suffix == ".safetensors":
                safetensors.torch.load(path.read_bytes())
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SafetensorError) as error:
            return f"{path.name} is not whole: {error}"
    return ""


@contextlib.contextmanager
def inputs_from(seed: int, folder: Path, temporary: Path) -> Iterator[None]:
    """Inside the block torch draws from `seed`, `folder` is the current one, and nothing is shown."""
    there, threads, tempfile.tempdir = Path.cwd(), torch.get_num_threads(), str(temporary)
    torch.manual_seed(seed)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(there)
        tempfile.tempdir = None
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block merges log and warn of nothing, have no progress bars, and end when their time is up."""
    bar, disabled = running.tqdm, logging.root.manager.disable
    running.tqdm = lambda *items, **options: bar(*items, **{**options, "disable": True})
    logging.disable(logging.CRITICAL)
    handler = signal.signal(signal.SIGALRM, hang)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        logging.disable(disabled)
        running.tqdm = bar


def hang(_: int, __: FrameType | None) -> None:
    raise HangError("too long")


def run_cases(kinds: list[str], count: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Runs `count` cases, the kinds in turn; writes the table and the first failures. Returns the counts by kind."""
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    failures: list[str] = []
    raising_lines()  # of the modules as they are imported
    with quiet(), tempfile.TemporaryDirectory(prefix="bad-inputs-") as name:
        for index in tqdm(range(count), dynamic_ncols=True):
            kind, number = kinds[index % len(kinds)], seed + index // len(kinds)
            outcome = run_case(kind, number, Path(name))
            counts[kind][outcome.verdict] += 1
            if outcome.verdict == FAILED:
                failures.append(f"--kind {kind} --seed {number} --count 1: {outcome.reason}")
            if index % 200 == 0:
                gc.collect()  # forwards that failed lie in cycles
    tqdm.write(table(counts))
    for line in failures if len(failures) <= NUM_SHOWN else [*failures[:NUM_SHOWN], "..."]:
        tqdm.write(line)
    return counts


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """The counts by kind and of all."""
    columns = [RIGHT, CLEAR, REFUSED, FAILED]
    total = sum(counts.values(), collections.Counter())
    lines = [f"{'kind':<16}{'cases':>8}" + "".join(f"{column:>23}" for column in columns)]
    for kind, found in [*counts.items(), ("all", total)]:
        lines.append(f"{kind:<16}{found.total():>8}" + "".join(f"{found[column]:>23}" for column in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="cases (10000), the kinds in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of every kind, the next has the next")
    parser.add_argument("--kind", choices=KINDS, nargs="+", help="only these kinds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = run_cases(arguments.kind or list(KINDS), arguments.count, arguments.seed)
    sys.exit(any(found[FAILED] for found in counts.values()))


if __name__ == "__main__":
    main()
