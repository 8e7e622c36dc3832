"""The search-path plugin, the configs it brings, and that it harms no other Hydra program."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli import ROOT, python, succeeded
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from hydra import compose, initialize_config_dir
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

import fusion_bench_crossmean as package
from hydra_plugins import fusion_bench_crossmean_searchpath as searchpath

METHODS = sorted(
    path.relative_to(ROOT / "config/method").with_suffix("") for path in (ROOT / "config/method").rglob("*.yaml")
)
BACKBONES = ("clip-vit-base-patch32", "clip-vit-base-patch16", "clip-vit-large-patch14")
TASK_SETS = {"TA8": 8, "TALL14": 14, "TALL20": 20}


def stock_folder() -> Path:
    """FusionBench's own config folder."""
    return searchpath.config_folders()[-1]


@contextmanager
def primary(folder: Path) -> Iterator[Callable[..., DictConfig]]:
    """Composes FusionBench's main config with `folder` as Hydra's primary one."""
    with initialize_config_dir(str(folder), version_base=None):
        yield lambda *overrides: compose("fabric_model_fusion", list(overrides))


@pytest.fixture
def composed() -> Iterator[Callable[..., DictConfig]]:
    with primary(stock_folder()) as compose_with:
        yield compose_with


def resolved(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=True)


def test_hydra_discovers_the_plugin():
    assert searchpath.CrossMeanSearchPathPlugin.__name__ in {
        c.__name__ for c in Plugins.instance().discover(SearchPathPlugin)
    }


def test_hydra_plugins_stays_a_namespace_package():
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    assert importlib.util.find_spec("hydra_plugins").origin is None


def test_search_path_gets_our_configs_and_the_stock_ones():
    search_path = ConfigSearchPathImpl()
    searchpath.CrossMeanSearchPathPlugin().manipulate_search_path(search_path)
    ours, stock = (Path(entry.path.removeprefix("file://")) for entry in search_path.get_path())
    assert (ours / "method" / "crossmean.yaml").is_file()
    assert (stock / "fabric_model_fusion.yaml").is_file()


# --- other Hydra programs ---

PROGRAM = """
import hydra, sys
@hydra.main(version_base=None, config_path=None)
def program(config):
    heavy = {"torch", "transformers", "lightning", "fusion_bench", "fusion_bench_crossmean"} & set(sys.modules)
    print("ran with", sorted(heavy))
program()
"""


def test_plugin_imports_neither_torch_nor_fusion_bench(tmp_path):
    assert "ran with []" in succeeded(python(PROGRAM, tmp_path))


@pytest.mark.parametrize("name", ["fusion_bench", "fusion_bench_crossmean"])
def test_broken_package_leaves_other_programs_alone(tmp_path, name):
    broken = tmp_path / "broken" / name
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken installation')")
    assert "ran with []" in succeeded(python(PROGRAM, tmp_path, PYTHONPATH=str(broken.parent)))


@pytest.mark.parametrize("error", [ImportError, OSError, ValueError, TypeError, RuntimeError, RecursionError])
def test_failing_plugin_warns_and_goes_on(monkeypatch, caplog, error):
    def fail() -> list[Path]:
        raise error("on purpose")

    monkeypatch.setattr(searchpath, "config_folders", fail)
    search_path = ConfigSearchPathImpl()
    searchpath.CrossMeanSearchPathPlugin().manipulate_search_path(search_path)
    assert search_path.get_path() == []
    assert "on purpose" in caplog.text


@pytest.mark.parametrize("name", ["no_such_package_at_all", "this"])  # absent; a module without a folder
def test_package_folder_of_what_is_no_package(name):
    assert searchpath.package_folder(name) is None


# --- methods ---


@pytest.mark.parametrize("method", map(str, METHODS))
def test_yaml_and_class_have_the_same_settings_and_defaults(composed, method):
    config = composed(f"method={method}").method
    cls = get_class(config._target_)
    assert cls is getattr(package, cls.__name__), "the YAML names the public class"
    assert sorted(key for key in config if key != "_target_") == sorted(cls.setting_names())
    assert instantiate(config).settings() == cls().settings()


def test_every_public_class_has_a_yaml(composed):
    targets = {composed(f"method={method}").method._target_ for method in METHODS}
    assert targets == {f"{package.__name__}.{name}" for name in package.__all__ if name != "__version__"}


@pytest.mark.parametrize("method", map(str, METHODS))
def test_every_setting_has_one_comment(method):
    lines = (ROOT / "config" / "method" / f"{method}.yaml").read_text(encoding="utf-8").splitlines()
    settings = [line for line in lines if re.match(r"[a-z]\w*:", line)]
    assert settings
    assert [line for line in settings if not re.search(r" # \w", line)] == []


# --- pools ---


@pytest.mark.parametrize("tasks", TASK_SETS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_short_names_are_the_stock_pools(composed, backbone, tasks):
    short = composed(f"modelpool={backbone}_{tasks}", f"taskpool={backbone}_{tasks}")
    stock = composed(
        f"modelpool=CLIPVisionModelPool/{backbone}_{tasks}",
        f"taskpool=CLIPVisionModelTaskPool/clip-vit-classification_{tasks}",
        f"taskpool.base_model=openai/{backbone}",
    )
    assert resolved(short.modelpool) == resolved(stock.modelpool)
    assert resolved(short.taskpool) == resolved(stock.taskpool)


@pytest.mark.parametrize("tasks", TASK_SETS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_pool_and_task_pool_belong_together(composed, backbone, tasks):
    config = composed(f"modelpool={backbone}_{tasks}", f"taskpool={backbone}_{tasks}")
    pool, taskpool = resolved(config.modelpool), resolved(config.taskpool)
    models = dict(pool["models"])
    assert models.pop("_pretrained_") == f"openai/{backbone}"
    assert models == {task: f"tanganke/{backbone}_{task}" for task in models}
    assert len(models) == TASK_SETS[tasks]
    assert set(models) == set(pool["train_datasets"]) == set(pool["test_datasets"]) == set(taskpool["test_datasets"])
    processor = pool["processor"]
    assert (
        processor if isinstance(processor, str) else processor["pretrained_model_name_or_path"]
    ) == f"openai/{backbone}"
    assert taskpool["base_model"] == f"openai/{backbone}"
    for part in ("clip_model", "processor", "data_processor"):
        assert taskpool[part]["pretrained_model_name_or_path"] == f"openai/{backbone}"


@pytest.mark.parametrize("name", ["mini-clip_TA8", "mini-clip-gelu_TA8"])
def test_mini_pools_have_the_stock_pools_keys(composed, name):
    config = composed(f"modelpool={name}", f"taskpool={name}")
    stock = composed("modelpool=clip-vit-base-patch32_TA8", "taskpool=clip-vit-base-patch32_TA8")
    assert set(config.modelpool) == set(stock.modelpool)
    assert set(config.taskpool) == set(stock.taskpool)
    assert len(config.modelpool.models) == 9


def test_stock_configs_stay_reachable_from_a_project_with_its_own_config_folder(tmp_path):
    (tmp_path / "config").mkdir()
    with primary(tmp_path / "config") as compose_with:
        model_only = "CLIPVisionModelPool/clip-vit-base-patch32_TA8_model_only"
        config = compose_with("method=simple_average", f"modelpool={model_only}")
        assert config.method._target_ == "fusion_bench.method.SimpleAverageAlgorithm"
        assert "train_datasets" not in config.modelpool or config.modelpool.train_datasets is None
        for method in METHODS:
            compose_with(
                f"method={method}", "modelpool=clip-vit-base-patch32_TA8", "taskpool=clip-vit-base-patch32_TA8"
            )


# --- resolvers ---


def test_asset_resolver_finds_weights_and_registers_the_tasks():
    folder = Path(OmegaConf.create({"x": "${crossmean_asset:mini-clip}/pretrained"}).x)
    assert (folder / "model.safetensors").is_file()
    assert "mini-letters" in CLIPTemplateFactory.get_available_datasets()


def test_unknown_asset_is_named():
    with pytest.raises(Exception, match="no asset 'mini-slip'; there are mini-clip, mini-clip-gelu"):
        OmegaConf.create({"x": "${crossmean_asset:mini-slip}"}).x  # noqa: B018


def test_cured_resolver_returns_its_argument_and_mends_fusion_bench(tmp_path):
    code = """
from hydra.core.plugins import Plugins
from hydra._internal.utils import create_config_search_path
from omegaconf import OmegaConf
create_config_search_path(None)
print(OmegaConf.create({"x": "${crossmean_cured:openai/clip-vit-base-patch32}"}).x)
from fusion_bench.taskpool import CLIPVisionModelTaskPool
print(CLIPVisionModelTaskPool.__name__)
"""
    output = succeeded(python(code, tmp_path))
    assert output.split() == ["openai/clip-vit-base-patch32", "CLIPVisionModelTaskPool"]
