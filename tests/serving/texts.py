"""Checkpoint folders with nothing in them but what has to do with text."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, TURN, THINK = "<bos>", "<eos>", "<|turn|>", "<think>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn|>{{ message.role }}: {{ message.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
"""A template that writes control tokens and strips contents, as published ones do."""


def byte_tokenizer(*, adds_bos=True):
    """A byte is a token, but for three special tokens and one that is only added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in (BOS, EOS, TURN)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


WORDS = {word: int.from_bytes(b"\x01" + word.encode(), "big") for word in ("a", "b", "c", "on")}
"""The token ids that `FakeTokenizer` gives these words."""


def word_tokenizer():
    """The fake engine's tokenizer as a file, for the words that fit into a token id."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, **WORDS}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write_text_files(folder, template=None, *, tokenizer=None, max_position_embeddings=64):
    """Makes `folder` a checkpoint as far as text goes."""
    folder.mkdir(exist_ok=True)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": {"content": EOS},
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"max_position_embeddings": max_position_embeddings}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def drafting(folder, **speculative):
    """A configuration of a pair that is never loaded."""
    return {
        "model": {"path": str(folder)},
        "speculative": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(folder),
            **speculative,
        },
    }
