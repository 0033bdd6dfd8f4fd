"""Draft heads written once more, as plainly as possible: one sequence, float64, no cache.

Everything is recomputed from the first entry on for every drafted token. Independent of the
package: tensors and settings come straight from the files.
"""

import math

import torch

from tests.helpers.checkpoints import read_checkpoint


class PlainHead:
    """An EAGLE, EAGLE-3 or MTP head. `switches` replace keys of its config."""

    def __init__(self, directory, target_dir, **switches):
        config, tensors = read_checkpoint(directory)
        target = {name: t.double() for name, t in read_checkpoint(target_dir)[1].items()}
        self.config = {**config, **switches}
        beside = "model.mtp_layers.0."
        self.is_mtp = any(name.startswith(beside) for name in tensors)
        if self.is_mtp:
            tensors = {
                name.replace(beside, "layers.0."): tensor
                for name, tensor in tensors.items()
                if name.startswith(beside)
            }
        self.tensors = {_plain_name(name): t for name, t in tensors.items()}
        self.floats = {name: t.double() for name, t in self.tensors.items()}
        shared = target["model.embed_tokens.weight"]
        self.embedding = self.floats.get("embed_tokens.weight", shared)
        self.target_head = target.get("lm_head.weight", shared)
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self.tensors
        self.num_layers = 1 + max(int(n.split(".")[1]) for n in self.tensors if "layers." in n)

    def unroll(self, token_ids, features):
        """Entries of all tokens: the first len(features) from features, the rest from own output.

        Returns hidden [n, H] as fed back, and logits [n, V or Vd].
        """
        inputs = self.encode(features.double())
        while True:
            hidden = self._forward(token_ids[: len(inputs)], inputs)
            if len(inputs) == len(token_ids):
                return hidden, self.logits(hidden)
            inputs = torch.cat((inputs, hidden[-1:]))

    def encode(self, features):
        """Target features to hidden states."""
        if not self.is_eagle3:
            return features
        if "input_norm.weight" in self.tensors:
            features = self._norm("input_norm", features)
        if "fc_norm.0.weight" in self.tensors:
            blocks = features.chunk(3, dim=1)
            features = torch.cat([self._norm(f"fc_norm.{i}", b) for i, b in enumerate(blocks)], 1)
        return self._linear("fc", features)

    def logits(self, hidden):
        """Logits of fed-back hidden states."""
        if not self.is_eagle3:
            return hidden @ self.target_head.T
        normed = hidden if self.config.get("norm_output") else self._norm("norm", hidden)
        return normed @ self.floats["lm_head.weight"].T

    def _forward(self, token_ids, inputs):
        embedded = self.embedding[token_ids]
        if self.is_mtp:
            embedded[0] = 0.0  # its position is 0
            normed = self._norm("layers.0.token_layernorm", embedded)
            normed = torch.cat((self._norm("layers.0.hidden_layernorm", inputs), normed), dim=1)
            stream = self._linear("layers.0.input_proj", normed)
            stream = self._layer(0, stream, self._norm("layers.0.input_layernorm", stream))
            return self._norm("layers.0.final_layernorm", stream)
        if self.is_eagle3:
            normed = self._norm("layers.0.hidden_norm", inputs)
            stream = normed if self.config.get("norm_before_residual") else inputs
            embedded = self._norm("layers.0.input_layernorm", embedded)
            stream = self._layer(0, stream, torch.cat((embedded, normed), dim=1))
        else:
            stream = self._linear("fc", torch.cat((embedded, inputs), dim=1))
            normed = stream
            if "layers.0.input_layernorm.weight" in self.tensors:
                normed = self._norm("layers.0.input_layernorm", stream)
            stream = self._layer(0, stream, normed)
        for index in range(1, self.num_layers):
            normed = self._norm(f"layers.{index}.input_layernorm", stream)
            stream = self._layer(index, stream, normed)
        return self._norm("norm", stream) if self.config.get("norm_output") else stream

    def _layer(self, index, stream, attention_input):
        prefix = f"layers.{index}."
        stream = stream + self._attention(prefix + "self_attn.", attention_input)
        normed = self._norm(prefix + "post_attention_layernorm", stream)
        gate = self._linear(prefix + "mlp.gate_proj", normed)
        gated = gate / (1 + torch.exp(-gate)) * self._linear(prefix + "mlp.up_proj", normed)
        return stream + self._linear(prefix + "mlp.down_proj", gated)

    def _attention(self, prefix, x):
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query = self._rotate(self._heads(prefix, "q", x, heads))
        key = self._rotate(self._heads(prefix, "k", x, kv_heads))
        value = self._heads(prefix, "v", x, kv_heads)
        key, value = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[2])
        future = torch.ones(len(x), len(x)).triu(1).bool()
        future |= torch.ones(len(x), len(x)).tril(-self.config.get("window", len(x))).bool()
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        out = torch.einsum("hqk,khd->qhd", weights, value)
        return self._linear(prefix + "o_proj", out.flatten(1))

    def _heads(self, prefix, which, x, count):
        out = self._linear(f"{prefix}{which}_proj", x).view(len(x), count, -1)
        norm = f"{prefix}{which}_norm"
        return self._norm(norm, out) if norm + ".weight" in self.tensors else out

    def _rotate(self, x):
        half = x.shape[2] // 2
        theta = self.config.get("rope_theta", 10000.0)
        frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=2)

    def _linear(self, name, x):
        out = x @ self.floats[name + ".weight"].T
        bias = self.floats.get(name + ".bias")
        return out if bias is None else out + bias

    def _norm(self, name, x):
        scale = (x.square().mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.floats[name + ".weight"]


def _plain_name(name):
    for old, new in (("model.", ""), ("midlayer.", "layers.0."), ("aux_norm_low", "fc_norm.0")):
        name = name.replace(old, new)
    return name.replace("aux_norm_mid", "fc_norm.1").replace("aux_norm_high", "fc_norm.2")
