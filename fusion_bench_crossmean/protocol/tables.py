"""The tables of a comparison, as Markdown and LaTeX."""

# pandas' own annotations are too wide to be checked against.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fusion_bench_crossmean.protocol.results import (
    SETTING,
    expanded,
    margins_by_setting,
    rank_correlation,
    with_margins,
)
from fusion_bench_crossmean.report import written_whole

#: How the best three of a column are marked.
MARKDOWN_MARKS = ("**{}**", "*{}*", "{} ³")
LATEX_MARKS = (r"\textbf{{{}}}", r"\underline{{{}}}", "{}$^3$")


@dataclass(frozen=True)
class Value:
    """One entry: its text, and the number by which a column is ranked (None: it takes no part)."""

    text: str
    rank_by: float | None = None


@dataclass(frozen=True)
class Table:
    """A table that can be written in two languages.

    Args:
        title: above it.
        header: column titles, the first one of the rows' names.
        rows: (name, entries).
        notes: below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Value]]]
    notes: Sequence[str] = field(default_factory=list)

    def as_markdown(self) -> str:
        """With the best three of each ranked column marked: bold, italic, ³."""
        lines = [f"| {' | '.join(self.header)} |", f"|{' --- |' * len(self.header)}"]
        lines += [f"| {' | '.join([name, *texts])} |" for name, texts in self._marked(MARKDOWN_MARKS)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"{note}\n" for note in self.notes)])

    def as_latex(self) -> str:
        """For booktabs: bold, underlined and a superscript three."""
        lines = [" & ".join(map(latex, self.header)) + r" \\ \midrule"]
        lines += [" & ".join([latex(name), *texts]) + r" \\" for name, texts in self._marked(LATEX_MARKS, latex)]
        columns = "l" + "r" * (len(self.header) - 1)
        notes = "".join(f"% {note}\n" for note in self.notes)
        begin = f"% {self.title}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
        return begin + "\n".join(lines) + f"\n\\bottomrule\n\\end{{tabular}}\n{notes}"

    def write(self, path: Path) -> None:
        """Writes `path` with the suffixes .md and .tex."""
        for suffix, text in ((".md", self.as_markdown()), (".tex", self.as_latex())):
            with written_whole(path.with_suffix(suffix)) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def _marked(
        self, marks: Sequence[str], escape: Callable[[str], str] = lambda text: text
    ) -> list[tuple[str, list[str]]]:
        columns = []
        for index in range(len(self.header) - 1):
            entries = [values[index] for _, values in self.rows]
            ranked = sorted({e.rank_by for e in entries if e.rank_by is not None}, reverse=True)
            best = (
                {value: mark for value, mark in zip(ranked[: len(marks)], marks, strict=True)}
                if len(ranked) >= len(marks)
                else {}
            )
            columns.append(
                [best[e.rank_by].format(escape(e.text)) if e.rank_by in best else escape(e.text) for e in entries]
            )
        return [(name, [column[i] for column in columns]) for i, (name, _) in enumerate(self.rows)]


def latex(text: str) -> str:
    """Escaped."""
    for before, after in (("%", r"\%"), ("_", r"\_"), ("±", r"$\pm$"), ("&", r"\&"), ("#", r"\#")):
        text = text.replace(before, after)
    return text


def spread(values: pd.Series, sign: str = "", digits: int = 2) -> str:
    """Mean and, of several values that differ, standard deviation."""
    values = values.dropna()
    if values.empty:
        return ""
    text = f"{values.mean():{sign}.{digits}f}"
    return f"{text} ± {values.std():.{digits}f}" if values.nunique() > 1 else text


def in_words(setting: Mapping[str, object], varying: Sequence[str]) -> str:
    """A setting by what varies between settings."""
    units = {"pool": "{}", "coverage": "{}", "num_samples": "N = {}", "task_set": "{}"}
    words = [units[name].format(setting[name]) for name in varying if not pd.isna(setting[name])]
    return ", ".join(words) or "score (%)"


def settings_of(frame: pd.DataFrame) -> tuple[list[dict[str, object]], list[str]]:
    """Every setting, and the names of what varies between them."""
    found = frame[SETTING].drop_duplicates()
    varying = [name for name in SETTING if name != "num_tasks" and found[name].nunique(dropna=False) > 1]
    places = {name: list(found[name].unique()) for name in ("pool", "task_set")}

    def place(setting: Mapping[str, Any]) -> tuple[float, ...]:
        """Pools and task sets as they come, mlp before full, small numbers before large ones."""
        count = setting["num_samples"]
        return (
            *(places[name].index(setting[name]) for name in places),
            str(setting["coverage"]) == "full",
            0 if pd.isna(count) else count,
        )

    return sorted(found.to_dict("records"), key=place), varying


def in_setting(frame: pd.DataFrame, setting: Mapping[str, object]) -> pd.DataFrame:
    """The lines of one setting."""
    for name, value in setting.items():
        frame = frame[frame[name].isna() if pd.isna(value) else frame[name] == value]
    return frame


def score_table(frame: pd.DataFrame, baseline: str, title: str, notes: Sequence[str]) -> Table:
    """Methods by settings: score, and paired margin over the baseline; last rho, where it was measured."""
    lines = with_margins(frame, baseline)
    lines = lines[lines["task"] == "mean"]
    settings, varying = settings_of(lines)
    names = list(dict.fromkeys(zip(lines["method"], lines["title"], strict=True)))
    base = next((t for m, t in names if m == baseline), baseline)
    header = ["method"]
    for setting in settings:
        header += [in_words(setting, varying), f"over {base}"]
    rows = []
    for method, label in names:
        entries = []
        for setting in settings:
            own = in_setting(lines[lines["method"] == method], setting)
            is_ranked = method not in ("experts", "pretrained")
            rank = float(own["score"].mean()) if len(own) and is_ranked else None
            entries.append(Value(spread(own["score"]), rank))
            entries.append(Value("" if method == baseline or not is_ranked else spread(own["margin"], sign="+")))
        rows.append((label, entries))
    if frame["rho"].notna().any():
        entries = []
        for setting in settings:
            entries += [Value(spread(in_setting(frame[frame["rho"].notna()], setting)["rho"], digits=3)), Value("")]
        rows.append(("rho", entries))
    return Table(title, header, rows, notes)


def task_table(frame: pd.DataFrame, title: str, notes: Sequence[str]) -> list[Table]:
    """Methods by tasks, one table per setting."""
    lines = expanded_scores(frame)
    settings, varying = settings_of(lines)
    tables = []
    for setting in settings:
        own = in_setting(lines, setting)
        tasks = [task for task in dict.fromkeys(own["task"]) if task != "mean"]
        rows = []
        for (method, label), found in own.groupby(["method", "title"], sort=False):
            is_ranked = method not in ("experts", "pretrained")
            means = {task: found[found["task"] == task]["score"] for task in [*tasks, "mean"]}
            rows.append((label, [Value(spread(v), float(v.mean()) if is_ranked else None) for v in means.values()]))
        words = in_words(setting, varying) if varying else ""
        tables.append(
            Table(f"{title}, by task" + (f" ({words})" if words else ""), ["method", *tasks, "mean"], rows, notes)
        )
    return tables


def expanded_scores(frame: pd.DataFrame) -> pd.DataFrame:
    """See `with_margins`; without margins."""
    return with_margins(frame, baseline="")


def correlation_table(frame: pd.DataFrame, baseline: str, title: str, notes: Sequence[str]) -> Table:
    """Rank correlation of every method's margin with rho, with the drift, and with the baseline's score.

    Over task sets, for each coverage and number of inputs apart. The last one is task difficulty, which rho is not to
    be taken for.
    """
    means = margins_by_setting(frame, baseline)
    difficulty = means[means["method"] == baseline].set_index(SETTING)["score"]
    _, varying = settings_of(means)
    rows = []
    for (_, label, coverage, count), own in means.groupby(
        ["method", "title", "coverage", "num_samples"], sort=False, dropna=False
    ):
        complete = own.dropna(subset=["margin", "rho"])
        if label == titles(means).get(baseline) or len(complete) < 3:
            continue
        others = [name for name in varying if name in ("coverage", "num_samples")]
        words = in_words({"coverage": coverage, "num_samples": count}, others) if others else ""
        entries = [Value(str(len(complete)))]
        index = pd.MultiIndex.from_frame(complete[SETTING])
        for values in (complete["rho"], complete["prefix_drift"], difficulty.reindex(index)):
            found = rank_correlation(values.to_numpy(float), complete["margin"].to_numpy(float))
            interval = f"[{found.low:+.2f}, {found.high:+.2f}]"
            entries += [Value(f"{found.estimate:+.2f} {interval}"), Value(f"{found.p_value:.1g}")]
        rows.append((f"{label} ({words})" if words else label, entries))
    header = ["margin of", "task sets", "rho", "p", "prefix drift", "p", "score of the baseline", "p"]
    extra = "Spearman over task sets; percentile bootstrap 95 % interval, two-sided permutation p."
    return Table(title, header, rows, [*notes, extra])


def titles(frame: pd.DataFrame) -> dict[str, str]:
    """Method -> its title."""
    return dict(zip(frame["method"], frame["title"], strict=True))


def seconds_table(frame: pd.DataFrame, baseline: str, title: str, notes: Sequence[str]) -> Table:
    """Seconds per merge, the chosen scale's only, and their ratio to the baseline's; as noisy as the machine."""
    lines = expanded(frame.drop_duplicates(["method", *SETTING, "seed"]))
    settings, varying = settings_of(lines)
    header, rows = ["method"], []
    for setting in settings:
        header += [f"seconds ({in_words(setting, varying)})" if varying else "seconds", "relative"]
    for (method, label), own in lines.groupby(["method", "title"], sort=False):
        entries = []
        for setting in settings:
            seconds = in_setting(own, setting)["seconds"].median()
            base = in_setting(lines[lines["method"] == baseline], setting)["seconds"].median()
            known = seconds == seconds  # not NaN: there is such a cell
            entries += [
                Value(f"{seconds:.1f}" if known else ""),
                Value(f"{seconds / base:.2f}" if known and base > 0 else ""),
            ]
        if method != "experts":
            rows.append((label, entries))
    return Table(title, header, rows, [*notes, "Medians over the seeds."])
