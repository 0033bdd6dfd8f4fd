"""A family, a weight format, a draft method, a drafter and a policy that live in this file alone.

They are registered as a package would, and run the events of the conformance table together.
"""

import re
from collections import Counter
from importlib.metadata import EntryPoint
from itertools import cycle

import pytest
import torch

from serve_spec.adaptive import StepPolicy
from serve_spec.cli import main
from serve_spec.core import registry
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.errors import PluginError
from serve_spec.core.registry import load_plugins
from serve_spec.core.round import RoundSteps
from serve_spec.layers.formats.base import Formats, WeightFormat
from serve_spec.layers.formats.choices import PLAIN as FLOATS
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import named_parts, parameter
from serve_spec.models.decoder import MLP, DecoderLayer
from serve_spec.models.drafts.base import Draft, DraftFamily, Evidence
from serve_spec.models.family import DecoderFamily
from serve_spec.plugins import DraftMethod, register_draft, register_format, register_target
from serve_spec.serving import processes
from serve_spec.worker.drafters.grow import DraftingRequests, draft_chains, draft_trees
from serve_spec.worker.step_buffers import DraftVocabulary
from tests.helpers import engines
from tests.helpers.checkpoints import (
    make_target,
    make_tokenizer,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.engines import Pair, recorded_plans
from tests.helpers.table import NUM_STEPS, Row
from tests.helpers.table import PLAIN as PLAIN_ROW
from tests.unit.engine.test_conformance import EVENTS, MAX_MODEL_LEN, check, decode_alone

TOY = "TABLE"
CHAIN = DraftShape.chain


# A family: keys and names of its own, layers of two kinds, another MLP.


class ReluMLP(MLP):
    """down(relu(up(x))²)."""

    def __init__(self, shape, parallel, formats):
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.up = Linear(hidden, {"up": inner}, parallel=parallel, formats=formats)
        self.down = Linear(
            inner, {"down": hidden}, parallel=parallel, is_row_parallel=True, formats=formats
        )

    def forward(self, x):
        return self.down.partials(self.up(x).relu().square())

    def tensors(self):
        return named_parts(("", self.up), ("", self.down))


class ToyFamily(DecoderFamily):
    def shape(self, config):
        return super().shape({**config, **{key: config[name] for name, key in KEYS.items()}})

    def layer_shape(self, config, shape, index):
        changes = {"softcap": 30.0} if index % 2 else {"num_kv_heads": 4, "has_sinks": True}
        return type(shape)(**{**vars(shape), "rotary_dim": 8, **changes})

    def windows(self, config, num_layers):
        return tuple(70 if index % 2 else None for index in range(num_layers))

    def layer(self, config, shape, index, parallel, formats):
        mlp = ReluMLP(shape, parallel, formats.under("mlp."))
        return DecoderLayer(shape, index, parallel=parallel, formats=formats, mlp=mlp)

    def renames(self, stored):
        return {name: re.sub(r"^toy\.blocks\.", "model.layers.", name) for name in stored}

    def check(self, config, shapes, directory):
        assert "model.layers.0.mlp.up.weight" in shapes


KEYS = {
    "width": "hidden_size",
    "inner": "intermediate_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
FAMILY = ToyFamily()


# A weight format: integers of eight bits with a scale per row.


class RowScaled(WeightFormat):
    def __init__(self, matrix):
        super().__init__()
        self._matrix = matrix
        self._values = torch.zeros(matrix.out_features, matrix.in_features, dtype=torch.int8)
        self._scale = torch.zeros(matrix.out_features)

    @property
    def num_bytes(self):
        return self._values.nbytes + self._scale.nbytes

    def tensors(self):
        values = self._matrix.destinations(".weight", self._values)
        return values | self._matrix.destinations(".weight_scale", self._scale, columns=None)

    def linear(self, x, out_dtype=None):
        return (x @ self._values.to(x.dtype).T * self._scale).to(out_dtype or x.dtype)


class ToyFormats(Formats):
    def of(self, paths, matrix):
        return FLOATS.of(paths, matrix) if "lm_head" in paths else RowScaled(matrix)


def toy_formats(settings):
    assert settings["quant_method"] == "toy8"
    return ToyFormats()


# A draft method: a table of what follows what, and the drafter that reads it.


class Table(Draft):
    drafter = f"{__name__}:TableDrafter"

    def __init__(self, vocab):
        super().__init__(hidden_size=1, caches=(), capture=None, feature_dim=0)
        self.table = parameter(vocab, vocab)

    def tensors(self):
        return {"table.weight": self.table}


class TableFamily(DraftFamily):
    renames = ((r"^stored_table$", "table.weight"),)

    def detect(self, config, shapes):
        return Evidence(["table.weight"]) if "table.weight" in shapes else None

    def build(self, file, target, options):
        with options.defaults(target):
            return Table(target.spec.vocab_size)

    def facts(self, file, target, options):
        return {"table": str(file.shapes["table.weight"])}


class TableDrafter:
    keeps_kv = False
    first_entry = 0
    has_constant_cost = False

    def __init__(self, model, memory):
        self.model, self.dtype = model, model.dtype

    def vocabulary(self):
        return DraftVocabulary(len(self.model.table), None)

    def slots_past(self, shape):
        return shape.size

    def draft(self, buffers, num_requests, shape):
        requests = DraftingRequests.first(buffers, num_requests, None)
        slots = requests.slots.long()
        newest = (requests.lengths.long() - 1) % buffers.slots.recent.shape[1]
        roots = buffers.slots.recent[slots, newest].long()

        def after_chain(drawn):
            return self.model.table[(drawn[-1] if drawn else roots).clamp_min(0)].float()

        def after_beam(step, beam):
            return self.model.table[(beam.token_ids.flatten() if step else roots).clamp_min(0)]

        if shape.is_chain:
            draft_chains(requests, shape.depth, after_chain)
        else:
            draft_trees(requests, shape, after_beam)


# A policy: every depth in turn.


class InTurn(StepPolicy):
    def __init__(self, context):
        chains = [CHAIN(depth) for depth in range(context.initial_steps + 1)]
        self.shapes = (*chains, *context.trees)
        self._next = cycle(self.shapes)

    def choose(self, batch):
        return RoundSteps(next(self._next))

    def snapshot(self):
        return {"strategy": "in turn"}


# The plug-in.


def register():
    register_target(f"{__name__}:FAMILY", ["ToyForCausalLM"])
    register_format(f"{__name__}:toy_formats", "toy8")
    register_draft(
        DraftMethod(
            TOY,
            f"{__name__}:TableFamily",
            claims=lambda config: config.get("model_type") == "toy_table",
        )
    )


def take_first_name():
    register_target("serve_spec.models.qwen2:FAMILY", ["LlamaForCausalLM"])


def register_half_a_family():
    register_target(f"{__name__}:EVENTS", ["HalfForCausalLM"])


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a package with the entry points of these values."""

    def install(*values):
        points = [
            EntryPoint(f"toy{i}", value, "serve_spec.plugins") for i, value in enumerate(values)
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        load_plugins.cache_clear()

    yield install
    load_plugins.cache_clear()


def make_toy_pair(root):
    """Write a quantized toy target and a table that is right about some tokens."""
    config, tensors = read_checkpoint(
        make_target(root / "plain", family="llama2", layers=4, layer_scale=0.25)
    )
    config = {
        **{name: config[key] for name, key in KEYS.items()},
        **{key: value for key, value in config.items() if key not in KEYS.values()},
        "architectures": ["ToyForCausalLM"],
        "model_type": "toy",
        "kv_heads": 2,
        "quantization_config": {"quant_method": "toy8"},
    }
    stored = {}
    for name, tensor in tensors.items():
        if "gate_proj" in name:
            continue
        for old, new in ((r"_proj(?=\.weight$)", ""),) if ".mlp." in name else ():
            name = re.sub(old, new, name)
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and re.search(r"\.[kv]_proj\.", name) and int(layer[1]) % 2:
            tensor = tensor[: len(tensor) // 2]  # two heads of four
        name = name.replace("model.layers.", "toy.blocks.")
        if layer and tensor.dim() == 2:
            scale = tensor.abs().amax(dim=1).clamp_min(1e-6) / 127
            stored[name.replace(".weight", ".weight_scale")] = scale
            tensor = (tensor / scale[:, None]).round().to(torch.int8)
        stored[name] = tensor
    for index in range(0, 4, 2):
        stored[f"toy.blocks.{index}.self_attn.sinks"] = torch.linspace(-1, 1, 4)
    write_checkpoint(root / "target", config, stored)
    make_tokenizer(root / "target")
    embedding = tensors["model.embed_tokens.weight"]
    normed = torch.nn.functional.rms_norm(embedding, embedding.shape[1:], eps=1e-5)
    table = normed @ tensors["lm_head.weight"].T
    write_checkpoint(root / "draft", {"model_type": "toy_table"}, {"stored_table": table})
    return Pair(root / "target", {TOY: root / "draft"})


@pytest.fixture
def make(tmp_path, install):
    install(f"{__name__}:register")
    make_llm = engines.llm_maker(make_toy_pair(tmp_path), "cpu")

    def make(row, **overrides):
        keys = {
            "num_pages": 256,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "max_model_len": MAX_MODEL_LEN,
            **row.keys,
        }
        if row != PLAIN_ROW:
            keys |= {
                "speculative_adaptive": True,
                "speculative_adaptive_strategy": f"{__name__}:InTurn",
            }
        num_steps = 0 if row == PLAIN_ROW else NUM_STEPS
        return make_llm(row.algorithm, num_steps, **{**keys, **overrides})

    return make


@pytest.mark.parametrize("is_tree", [False, True])
def test_what_another_package_adds_runs_the_table_without_a_change_of_this_one(make, is_tree):
    row = Row(TOY, is_tree)
    alone = decode_alone(make)
    for event in ("preemption", "prefix", "late"):
        check(EVENTS[event](make, row), alone, row, event)
    llm = make(row)
    shapes, plans = Counter(), recorded_plans(llm)
    EVENTS["none"](lambda *_, **__: llm, row)
    shapes.update(plan.shape for plan in plans if plan.decode_requests)
    assert {PLAIN, CHAIN(1), CHAIN(NUM_STEPS)} <= set(shapes)
    assert is_tree == any(not shape.is_chain for shape in shapes)
    assert llm.engine.worker.target.model.spec.caches[0].has_sinks
    layer = llm.engine.worker.target.model.layers[1]
    assert isinstance(layer.attention.qkv.format, RowScaled)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["absent_package:register"], ["absent_package", "No module named", "uninstall it"]),
        ([f"{__name__}:no_such_function"], ["tests", "no_such_function", "uninstall it"]),
        (
            [f"{__name__}:take_first_name"],
            ["'LlamaForCausalLM'", "serve_spec.models.llama", "serve_spec.models.qwen2"],
        ),
    ],
)
def test_a_plug_in_that_does_not_load_stops_a_command_in_one_line(
    install, tmp_path, monkeypatch, capsys, values, words
):
    monkeypatch.setattr(processes, "supervise", lambda serve: serve())  # in this process
    install(*values)
    target = make_target(tmp_path / "target")
    for command in (["check-config", str(target)], ["serve", str(target)]):
        load_plugins.cache_clear()
        assert main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert [word for word in words if word not in line] == []


def test_a_family_without_a_needed_hook_is_refused_in_one_line(install, tmp_path, capsys):
    install(f"{__name__}:register_half_a_family")
    target = make_target(tmp_path / "target", architectures=["HalfForCausalLM"])
    assert main(["check-config", str(target)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for word in ("HalfForCausalLM", "lacks defaults, spec", "use a version of tests"):
        assert word in line


def test_two_draft_methods_of_one_name_are_refused():
    register()
    with pytest.raises(PluginError, match=f"{TOY}.*registered by tests .* and by other "):
        register_draft(DraftMethod(TOY, "other.drafts:Family"))
