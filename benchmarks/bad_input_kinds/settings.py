"""Bad settings of every algorithm, and output paths that cannot be written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bad_input_kinds.networks import (
    METHODS,
    NUM_INPUTS,
    Attempt,
    Kind,
    OnPurpose,
    attempt_of,
    networks,
    one_of,
    vectors,
)
from fusion_bench_crossmean import AlignmentCriterionAnalyzer

#: Of any kind, for any setting. No text among them is a path outside of the current folder.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.0, -0.0, 0.5, 1.0, 1.5, -1e-9, 1e-300, 1e300, 10**9, 10**30, -(10**30)),
    *(
        math.nan,
        math.inf,
        -math.inf,
        1j,
        "",
        " ",
        "nan",
        "0.5",
        "auto",
        "full",
        "float32",
        "bfloat16",
        "float99",
        "__doc__",
    ),
    *("mean", "a.json", "{log_dir}/a.json", "{}", "{0}", "a\0b", "ä\n☃", "x" * 5000, b"full", [], [0.5], [0, 1], ["a"]),
    *(
        [[]],
        (),
        (1,),
        {},
        {"a": 1},
        {"a": None},
        {"a": math.nan},
        {"a": {"b": {}}},
        {"b": "."},
        {1: 2},
        {None: 1},
        set(),
    ),
    *({"a": 0, "b": 0}, {"a": 1e308, "b": 1e308}, {"a": "1"}, {"zzz": 1}, [None], [math.nan], [1e-320, 1], [True]),
    *(object, object(), len, range(3), Path("p"), Path("p/q.json"), torch.float64, torch.tensor(0.5), torch.ones(3)),
    *(np.float32(0.5), np.int64(4), np.array([0.0, 1.0]), np.nan, OnPurpose("value"), Ellipsis, [0.1] * 50),
]
#: Values that would be taken at their word, by a machine that has to live on.
FATAL = {"num_workers": lambda value: isinstance(value, int) and value > 1}


def settings(generator: np.random.Generator, folder: Path) -> Attempt:
    """One to three settings of one algorithm have a value out of `VALUES`, or there is one that does not exist."""
    method = one_of(generator, METHODS)
    known = [name for name in method.setting_names() if name != "kwargs"]
    chosen: dict[str, Any] = {}
    for _ in range(one_of(generator, [1, 1, 1, 2, 3])):
        name, value = one_of(generator, known), one_of(generator, VALUES)
        if generator.random() < 0.03:
            name = one_of(generator, ["", "ridge", "__class__", "run", "ä", "report", "kwargs", "args", "program"])
        if not FATAL.get(name, lambda _: False)(value):
            chosen[name] = value
    good = {"num_calibration_samples": NUM_INPUTS, "batch_size": 3, "coverage": one_of(generator, ["mlp", "full"])}
    if method is AlignmentCriterionAnalyzer and generator.random() < 0.5:
        good["return_averaged_model"] = True
    experts, inputs = networks(), vectors()
    if method.needs_pretrained or generator.random() < 0.2:
        experts = {"_pretrained_": networks()["a"], **experts}

    def run() -> Any:
        return method(**good | chosen).run(experts, inputs)

    may_be_none = method is AlignmentCriterionAnalyzer or chosen.get("preflight_only") is True
    return Attempt(f"{method.__name__}, {chosen!r:.200}", run, next(iter(experts.values())), may_be_none)


def outputs(generator: np.random.Generator, folder: Path) -> Attempt:
    """The report, the checkpoint or the statistics are to go where there is no place, or an odd one."""
    (folder / "file").write_text("in the way")
    (folder / "folder").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "below").symlink_to("nowhere/at/all")
    (folder / "round").symlink_to("round")
    (folder / "link").symlink_to("folder")
    paths: list[Any] = [
        *(
            "",
            ".",
            "..",
            "/",
            "/proc/a",
            "/dev/null",
            "/dev/null/a",
            "/dev/full",
            "folder",
            "folder/",
            "file",
            "file/a",
        ),
        *("file/..", "file/../b", "dangling", "dangling/a", "below", "below/a", "round", "round/a", "link/a", "../c"),
        *(
            "../../d/e",
            "n" * 256,
            "n" * 255,
            "n" * 250,
            "m/" * 30 + "x",
            "m/" * 3000,
            "n" * 240 + ".json",
            "a\0b",
            "\n",
        ),
        *(" ", "~", "$HOME", "ä☃", "\udcff", "a.png", "a.json/b", "folder/a.json", "{}", "{log_dir}"),
        *("a:b*?<>|", "-rf", ".hidden", "..a", "a.tar.gz", "a.", "...", "./a/../b.json", "*", "file.json"),
        *(Path("a"), Path(), b"a", 7, None, [], "{0}", "{log_dir!r}", "CON", "\ud800"),
    ]
    name = one_of(generator, ["report_path", "report_path", "checkpoint_dir", "save_statistics"])
    value = one_of(generator, paths)
    methods = METHODS if name == "report_path" else METHODS[:-1]
    return attempt_of(generator, f"{name}={value!r:.80}", networks(), vectors(), methods, **{name: value})


SETTING_KINDS: dict[str, Kind] = {"settings": settings, "outputs": outputs}
