"""Prompts as users give them: token ids, text or a file."""

from collections.abc import Sequence
from pathlib import Path

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer


def check_token_ids(prompt: Sequence[int], cfg: Config) -> None:
    """UserError for an empty prompt, an id outside the vocabulary, or more rows than positions."""
    if not prompt:
        raise UserError("prompt: must hold at least one token")
    for index, token in enumerate(prompt):
        if not 0 <= token < cfg.vocab_size:
            raise UserError(
                f"token id {token} at index {index} of the prompt must be in [0, {cfg.vocab_size})"
            )
    if len(prompt) > cfg.max_position_embeddings:
        limit = cfg.max_position_embeddings
        raise UserError(f"prompt of {len(prompt)} tokens must fit max_position_embeddings={limit}")


def parse_token_ids(text: str) -> list[int]:
    """Ids from "1,2,3"; UserError names what is no integer."""
    ids = []
    for item in text.split(","):
        try:
            ids.append(int(item))
        except ValueError:
            raise UserError(f"token ids: {item!r} must be an integer") from None
    return ids


def read_text(path: str) -> str:
    """The text of a UTF-8 file; UserError names the file and what is wrong with it."""
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8 text, byte {error.start} is not") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text after the BOS."""
    return tokenizer.encode(text, bos=True)
