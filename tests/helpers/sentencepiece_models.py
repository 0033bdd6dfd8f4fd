"""SentencePiece models that are trained on a file of the package."""

from pathlib import Path

import pytest

import serve_spec

CORPUS = Path(serve_spec.__file__).parent / "config/base.py"
SAMPLES = ["Hello  world\n", "def f(x):\n\treturn é", "<s>", " a", ""]


def train_sentencepiece(folder, model_type):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=str(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        model_type=model_type,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
