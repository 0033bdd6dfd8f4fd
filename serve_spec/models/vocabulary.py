"""Whether two checkpoints mean the same by the same token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve_spec.core.errors import CheckpointError
from serve_spec.models.shape import read_json


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """The id of every token, from `tokenizer.json`; None where there is none.

    Raises:
        CheckpointError: the file holds no vocabulary.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    content = read_json(path)
    try:
        listed: Any = content["model"]["vocab"]
        if isinstance(listed, list):  # Unigram: [piece, score] by id
            listed = {piece: index for index, (piece, _) in enumerate(listed)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        return {**listed, **added}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no vocabulary ({error!r}); fetch it again") from error


def check_same_tokens(draft: Path, target: Path) -> bool:
    """Makes sure that the tokens of both folders are the same; False if one has no tokenizer.

    Raises:
        CheckpointError: a token has different ids, or is unknown to one of them.
    """
    ours, theirs = read_vocabulary(draft), read_vocabulary(target)
    if ours is None or theirs is None:
        return False
    for token in (*ours, *theirs):
        if ours.get(token) != theirs.get(token):
            raise CheckpointError(
                f"{draft}: token {token!r} has id {ours.get(token)}, but {theirs.get(token)} in "
                f"{target}; use a draft with the target's own tokenizer"
            )
    return True
