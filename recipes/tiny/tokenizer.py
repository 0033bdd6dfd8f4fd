"""Byte-level BPE tokenizer: lossless on any text; `<eos>` has id 0 and starts each document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from recipes.tiny.settings import EOS_TOKEN
from recipes.training.settings import EOS_ID

_BATCH_DOCUMENTS = 2000


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_chars: int) -> Tokenizer:
    """Train on the first `max_chars` characters of `texts`.

    Raises:
        ValueError: too few distinct pairs in the texts for `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_head(texts, max_chars), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the corpus yields {tokenizer.get_vocab_size()} tokens; "
            "give more text or a smaller vocabulary"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS_TOKEN} $A", pair=None, special_tokens=[(EOS_TOKEN, EOS_ID)]
    )
    return tokenizer


def _head(texts: Iterable[str], max_chars: int) -> Iterator[str]:
    left = max_chars
    for text in texts:
        if left <= 0:
            return
        left -= len(text)
        yield text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json from `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Tensor:
    """Return one int16 stream [N], N <= max_tokens, each document led by `<eos>`."""
    parts: list[Tensor] = []
    count = 0
    for start in range(0, len(texts), _BATCH_DOCUMENTS):
        batch = tokenizer.encode_batch_fast(list(texts[start : start + _BATCH_DOCUMENTS]))
        for encoding in batch:
            parts.append(torch.tensor(encoding.ids, dtype=torch.int16))
            count += len(parts[-1])
        if count >= max_tokens:
            break
    return torch.cat(parts)[:max_tokens]
