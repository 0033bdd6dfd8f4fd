"""The files in `configs/` are what a newcomer copies: they must load and say what they mean."""

import json
from pathlib import Path

import pytest

from serve_spec.config import ConfigError, ServeSpecConfig, base
from serve_spec.config.adaptive_file import PRESETS, load_slots

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def _stand_in_assets(tmp_path, monkeypatch):
    # Only the files are checked here; tests of the engine load the trained pair.
    for name in ("tiny/target", "tiny/eagle3"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(base, "ASSETS", tmp_path)


@pytest.mark.usefixtures("_stand_in_assets")
@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(file):
    config = ServeSpecConfig.load(file)
    tokens = (config.cache.num_pages or 0) * config.cache.page_size
    assert tokens >= (config.model.max_model_len or 0), "its cache must hold its longest text"


@pytest.mark.usefixtures("_stand_in_assets")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_chosen_by_its_name_or_its_file(name):
    file = CONFIGS / "adaptive" / f"{name}.json"
    assert json.loads(file.read_text()) == PRESETS[name]
    config = ServeSpecConfig.load(CONFIGS / "tiny.yaml", speculative_adaptive_config=name)
    assert config.speculative.speculative_adaptive_config == name
    assert load_slots(name) == load_slots(file)
    again = ServeSpecConfig.load(config, speculative_num_steps=2)
    assert again.speculative.speculative_adaptive_config == name
    with pytest.raises(ConfigError, match="conservativ"):
        ServeSpecConfig.load(config, speculative_adaptive_config="conservativ")


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "adaptive").glob("*.json")), ids=lambda p: p.name
)
def test_every_shipped_adaptive_config_loads(file):
    assert load_slots(file)
