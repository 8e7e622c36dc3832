"""What goes with a merged model that is saved: a model card, its report, its processor or tokenizer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from huggingface_hub import ModelCardData

from fusion_bench_crossmean.calibration import preprocessor_of
from fusion_bench_crossmean.method.records import summary
from fusion_bench_crossmean.origins import is_hub_name, public
from fusion_bench_crossmean.report import mean, write_json, written_whole

CARD, REPORT = "README.md", "crossmean_report.json"
#: Settings that are paths on the machine of a merge, and those of its inputs.
LOCAL = ("report_path", "checkpoint_dir", "save_statistics", "load_statistics", "calibration_data")
OF_INPUTS = ("num_calibration_samples", "seed", "batch_size", "token_dropout", "precision")
TAGS = ["fusion-bench", "merge", "model-merging"]


@dataclass(frozen=True)
class Companions:
    """What goes with a model that FusionBench is going to save.

    Args:
        saved: where the model goes.
        is_folder: whether that is a folder, as for transformers' models; otherwise it is one file, a state dict, and
            card and report go beside it, ``merged.pt.md`` and ``merged.pt.json``.
        preprocessor: its processor or tokenizer, with `save_pretrained`; None: there is none.
    """

    saved: Path
    is_folder: bool
    preprocessor: Any

    @classmethod
    def of(cls, modelpool: BaseModelPool, saved: Path) -> Companions:
        """For a merged model of this pool."""
        is_folder = is_saved_as_folder(modelpool)
        preprocessor = preprocessor_of(modelpool) if is_folder else None
        return cls(saved, is_folder, preprocessor if hasattr(preprocessor, "save_pretrained") else None)

    def write(self, report: Mapping[str, Any]) -> None:
        """Writes them, each file whole or not at all."""
        card = self.saved / CARD if self.is_folder else beside(self.saved, ".md")
        record = self.saved / REPORT if self.is_folder else beside(self.saved, ".json")
        write_json(record, report)
        with written_whole(card) as path:
            path.write_text(model_card(report), encoding="utf-8")
        if self.preprocessor is None:
            return
        with tempfile.TemporaryDirectory(dir=self.saved, prefix=".processor-") as temporary:
            self.preprocessor.save_pretrained(temporary)
            for path in [path for path in Path(temporary).rglob("*") if path.is_file()]:
                final = self.saved / path.relative_to(temporary)
                final.parent.mkdir(parents=True, exist_ok=True)
                path.replace(final)


def is_saved_as_folder(modelpool: BaseModelPool) -> bool:
    """Whether FusionBench saves a model of this pool as a folder; otherwise it is one file, a state dict."""
    return type(modelpool).save_model is not BaseModelPool.save_model


def expands_home(modelpool: BaseModelPool) -> bool:
    """Whether FusionBench takes ``~`` in the path of a model of this pool for the home folder."""
    return any(kind.__name__ in ("SequenceClassificationModelPool", "CausalLMPool") for kind in type(modelpool).__mro__)


def cell(text: object) -> str:
    """Text in a table of the card: what would end its cell is written otherwise."""
    return str(text).replace("|", "\\|").replace("`", "'").replace("\n", " ")


def beside(path: Path, suffix: str) -> Path:
    """Its name with something more at the end."""
    return path.with_name(path.name + suffix)


def model_card(report: Mapping[str, Any]) -> str:
    """The card of a merged model, in the hub's format: metadata, then Markdown.

    Args:
        report: of its merge.
    """
    origins = {name: public(origin) for name, origin in report["experts"].items()}
    bases = [origin["source"] for origin in origins.values() if is_hub_name(origin["source"])]
    relation = {"base_model": list(dict.fromkeys(bases)), "base_model_relation": "merge"} if bases else {}
    metadata = ModelCardData(library_name="transformers", tags=[*TAGS, report["method"]], **relation)
    experts = [
        f"| {cell(name)} | {cell(origin['source'])} | {origin['revision'] or ''} | "
        f"{report['hashes']['experts'].get(name, '')} |"
        for name, origin in origins.items()
    ]
    # A merge from statistics has the inputs of the merge that kept them.
    measured = report["statistics"]["settings"] if "statistics" in report else {}
    used = report["settings"] | {key: value for key, value in measured.items() if key in OF_INPUTS}
    settings = [f"{key}: {json.dumps(value, default=str)}" for key, value in used.items() if key not in LOCAL]
    layers = report["layers"]
    alignment = mean([value for layer in layers for value in layer["alignment"].values()])
    check = report.get("self_check") or {}
    checks = [f"{name} {mean(list(values.values())):.4f}" for name, values in check.items()]
    warnings = [f"- {cell(text)}" for text in report["warnings"]] or ["None."]
    return "\n".join(
        [
            "---",
            metadata.to_yaml(),
            "---",
            "",
            f"# {len(report['tasks'])} experts merged by {report['method']}",
            "",
            f"Merged without training or labels by fusion-bench-crossmean "
            f"{report['versions']['fusion-bench-crossmean']} for FusionBench, from "
            f"{min(report['num_inputs_used'].values(), default=0)} unlabelled inputs per task. Activation: "
            f"{report['activation']}. Everything below, and more, is in `{REPORT}`.",
            "",
            "| model | source | revision | hash of its weights |",
            "| --- | --- | --- | --- |",
            *experts,
            "",
            f"Hash of the merged weights: {report['hashes']['merged']}.",
            "",
            "## Settings",
            "",
            "```yaml",
            *settings,
            "```",
            "",
            "## Layers",
            "",
            f"Mean alignment of the statistics (rho on the merge's own inputs): {alignment:.4f}. "
            + (f"Cosine with the experts' features on a few inputs: {', '.join(checks)}." if checks else ""),
            "",
            "```text",
            summary(layers),
            "```",
            "",
            "## Warnings",
            "",
            *warnings,
            "",
            "## To repeat it",
            "",
            "```bash",
            report["command"] or "# merged from Python, with the settings above",
            "```",
            "",
        ]
    )
