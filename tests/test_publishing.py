"""What lies beside a saved model: it can be loaded, read, repeated and pushed to a hub."""

from __future__ import annotations

import base64
import http.server
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli import FAST, POOLS, fusion_bench, log_folder, python, read_json, succeeded
from fake_hub import TA8, hashed
from families import FAMILIES, pico_architectures
from fusion_bench.modelpool import BaseModelPool, CLIPVisionModelPool
from huggingface_hub import ModelCard
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoTokenizer, CLIPProcessor

from fusion_bench_crossmean import CrossMeanAlgorithm
from fusion_bench_crossmean.method.publishing import cell
from fusion_bench_crossmean.origins import is_hub_name, origin_of, public
from fusion_bench_crossmean.report import command

pytest_plugins = ("cli",)


@pytest.fixture(scope="module")
def published(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model of the fake hub's pool, as the command line saves it."""
    folder = tmp_path_factory.mktemp("published")
    saved = "merged_model_save_path='{log_dir}/merged'"
    succeeded(fusion_bench("method=crossmean", *POOLS, *FAST, saved, cwd=folder, HF_HOME=str(hub)))
    return log_folder(folder / "outputs") / "merged"


@pytest.mark.float32
def test_a_saved_folder_is_an_entry_of_a_pool(published: Path) -> None:
    pool = CLIPVisionModelPool({"merged": str(published)}, processor=str(published), platform="hf")
    network = pool.load_model("merged")
    assert all(parameter.isfinite().all() for parameter in network.parameters())
    assert isinstance(pool.load_processor(), CLIPProcessor)
    assert not [path for path in published.iterdir() if path.name.startswith(".")]


@pytest.mark.float32
def test_the_card_names_experts_revisions_settings_and_hashes(published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    names = [f"tanganke/clip-vit-base-patch32_{task}" for task in TA8]
    metadata = card.data.to_dict()
    assert metadata["base_model"] == [*names, "openai/clip-vit-base-patch32"]
    assert metadata["base_model_relation"] == "merge"
    assert metadata["library_name"] == "transformers"
    assert "fusion-bench" in metadata["tags"]
    report = read_json(published / "crossmean_report.json")
    assert report == read_json(published.parent / "crossmean_report.json")
    for task, name in zip(TA8, names, strict=True):
        assert report["experts"][task] == {"source": name, "revision": hashed(name)}
        assert f"| {task} | {name} | {hashed(name)} | {report['hashes']['experts'][task]} |" in card.text
    assert report["hashes"]["merged"] in card.text
    assert "relative_ridge: 0.0001" in card.text
    assert report["layers"][0]["name"] in card.text
    assert report["command"] in card.text
    assert str(published.parents[3]) not in card.content, "no path of this machine"


@pytest.mark.float32
def test_the_reports_last_line_is_a_command_that_makes_the_same_model(
    published: Path, hub: Path, tmp_path: Path
) -> None:
    report = read_json(published / "crossmean_report.json")
    assert list(report)[-1] == "command"
    program, *arguments = shlex.split(report["command"])
    assert program == "fusion_bench"
    succeeded(fusion_bench(*arguments, cwd=tmp_path, HF_HOME=str(hub)))
    again = read_json(log_folder(tmp_path / "outputs") / "crossmean_report.json")
    assert again["hashes"] == report["hashes"]
    assert again["command"] == report["command"]


def test_the_command_of_a_job_among_several_is_its_own(tmp_path: Path) -> None:
    config = tmp_path / "conf" / "method"
    config.mkdir(parents=True)
    (config / "mine.yaml").write_text(
        "_target_: fusion_bench_crossmean.CrossMeanAlgorithm\nnum_calibration_samples: 8\n"
    )
    saved = "merged_model_save_path='{log_dir}/merged model'"
    arguments = ["--config-dir", "conf", "-m", "method=mine,crossmean/regmean", "modelpool=mini-clip_TA8", saved]
    succeeded(fusion_bench(*arguments, "fast_dev_run=true", cwd=tmp_path))
    commands = [
        shlex.split(read_json(path)["command"])
        for path in sorted(log_folder(tmp_path / "outputs").glob("crossmean_report*.json"))
    ]
    place = ["fusion_bench", "--config-dir", str(tmp_path / "conf")]
    rest = ["modelpool=mini-clip_TA8", saved, "fast_dev_run=True"]
    assert commands == [[*place, f"method={name}", *rest] for name in ("mine", "crossmean/regmean")]


def merged_with_program(pool: Any, saved: Path, log_dir: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A merge as FusionBench's program runs it, which is about to save the model at `saved`."""
    method = CrossMeanAlgorithm(num_calibration_samples=4, batch_size=4, report_path=str(log_dir / "report.json"))
    method._program = SimpleNamespace(merged_model_save_path=str(saved))
    return method.run(pool), method.report


def test_a_merged_text_encoder_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    pool = FAMILIES["bert"].pool(tmp_path / "experts")
    merged, _ = merged_with_program(pool, tmp_path / "saved", tmp_path)
    pool.save_model(merged, str(tmp_path / "saved"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "experts" / "tokenizer").get_vocab()
    card = ModelCard.load(tmp_path / "saved" / "README.md")
    assert "base_model" not in card.data.to_dict(), "local experts have no name on the hub"
    assert "| mood | mood |" in card.text


def test_beside_a_state_dict_lie_card_and_report(tmp_path: Path) -> None:
    (tmp_path / "architectures").mkdir()
    with pico_architectures(tmp_path / "architectures"):
        pool = FAMILIES["openclip"].pool(tmp_path / "pool")
        merged, report = merged_with_program(pool, tmp_path / "out" / "merged.pt", tmp_path)
    pool.save_model(merged, str(tmp_path / "out" / "merged.pt"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["merged.pt", "merged.pt.json", "merged.pt.md"]
    assert read_json(tmp_path / "out" / "merged.pt.json")["hashes"] == report["hashes"]
    assert "# merged from Python" in (tmp_path / "out" / "merged.pt.md").read_text()


def test_a_model_is_saved_over_an_older_one_and_beside_others(tmp_path: Path) -> None:
    pool = FAMILIES["bert"].pool(tmp_path / "experts")
    for name in ("merged_model", "merged_model", "other"):
        merged, _ = merged_with_program(pool, tmp_path / name, tmp_path)
        pool.save_model(merged, str(tmp_path / name))


@pytest.mark.parametrize("family", ["bert", "openclip"])
def test_a_place_where_no_model_can_be_saved_is_refused(family: str, tmp_path: Path) -> None:
    (tmp_path / "architectures").mkdir()
    with pico_architectures(tmp_path / "architectures"):
        pool = FAMILIES[family].pool(tmp_path / "experts")
        place = tmp_path / "place"
        place.write_text("a file") if family == "bert" else place.mkdir()
        with pytest.raises(OSError, match=str(place)):
            merged_with_program(pool, place, tmp_path)


def test_names_do_not_break_the_cards_tables() -> None:
    assert cell("a|b\nc `d`") == "a\\|b c 'd'"


def test_interpolations_in_overrides_stay_as_they_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = OmegaConf.create({"hydra": [], "task": ["method.token=${oc.env:SECRET}", "method.batch_size=${.seed}"]})
    runtime = SimpleNamespace(config_sources=[])
    config = SimpleNamespace(
        overrides=overrides, runtime=runtime, job=SimpleNamespace(config_name="fabric_model_fusion")
    )
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(HydraConfig, "get", lambda: config)
    monkeypatch.setenv("SECRET", "s3cret")
    words = shlex.split(command() or "")
    assert words == ["fusion_bench", "method.token=${oc.env:SECRET}", "method.batch_size=${.seed}"]


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's side of a push, as much as its client needs; keeps what was committed."""

    files: dict[str, bytes]
    cards: list[str]

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            found: Any = {"url": f"{self.address}/someone/merged", "id": "1", "name": "someone/merged"}
        elif self.path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            found = {"errors": [], "warnings": []}
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            found = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            found = {"commitUrl": f"{self.address}/someone/merged/commit/1", "commitOid": "1", "pullRequestUrl": None}
        else:
            self.send_error(404, self.path)
            return
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Hub]]]:
    """Address of a hub on this machine, and what it was given."""
    handler = type("OwnHub", (Hub,), {"files": {}, "cards": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", handler
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.float32
def test_the_folder_passes_the_checks_of_a_push(published: Path, server: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, hub = server
    code = (
        "from huggingface_hub import HfApi; HfApi().create_repo('someone/merged');"
        f"HfApi().upload_folder(repo_id='someone/merged', folder_path={str(published)!r})"
    )
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_TOKEN": "hf_x", "HF_HOME": str(tmp_path)}
    succeeded(python(code, tmp_path, **variables, HF_HUB_DISABLE_XET="1"))
    assert set(hub.cards) == {(published / "README.md").read_text()}
    assert hub.files.keys() == {path.name for path in published.iterdir()}
    assert hub.files["model.safetensors"] == (published / "model.safetensors").read_bytes()


def test_origins_of_models_in_every_form_that_a_pool_takes(tmp_path: Path) -> None:
    revision = "0123456789" * 4
    snapshot = f"/cache/models--me--expert/snapshots/{revision}"
    module = nn.Linear(1, 1)
    pool = SimpleNamespace(
        _models=OmegaConf.create(
            {
                "name": "me/expert",
                "target": {"_target_": "f", "pretrained_model_name_or_path": "me/other"},
                "state": {"model_name": "ViT-B-32", "state_dict_path": "/data/weights.pt"},
                "cached": snapshot,
                "call": {"_target_": "package.make"},
            }
        )
    )
    loaded = SimpleNamespace(name_or_path=snapshot)
    found = {name: origin_of(pool, name, module) for name in pool._models}
    assert found == {
        "name": {"source": "me/expert", "revision": None},
        "target": {"source": "me/other", "revision": None},
        "state": {"source": "/data/weights.pt", "revision": None},
        "cached": {"source": "me/expert", "revision": revision},
        "call": {"source": "package.make", "revision": None},
    }
    assert origin_of(pool, "name", loaded) == {"source": "me/expert", "revision": revision}
    committed = SimpleNamespace(config=SimpleNamespace(_commit_hash="abc"))
    assert origin_of(pool, "name", committed)["revision"] == "abc"
    assert origin_of(BaseModelPool({"a": module}), "a", module) == {"source": "Linear in memory", "revision": None}
    assert public(found["state"])["source"] == "weights.pt"
    assert public(found["name"])["source"] == "me/expert"


def test_names_on_the_hub_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("openai/clip-vit-base-patch32")
    (tmp_path / "mine" / "expert").mkdir(parents=True)
    for other in ("mine/expert", "/data/expert", "./expert", "a/b/c", "expert", "", None, "has space/x", "x/--"):
        assert not is_hub_name(other), other
