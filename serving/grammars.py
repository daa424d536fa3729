"""Grammars of one tokenizer, compiled and followed by llguidance."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.batch import everything
from serving.grammar import Grammar, Matcher
from serving.grammar_probe import Probe, compiled, fault_of

MAX_CHARS = 64 * 2**10
_KEPT = 32
# Without a bound a model that is not asked for JSON may write blanks until its limit.
_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


class Grammars:
    """Compiles grammars and moves matchers on. Compiling is safe in any thread; UserError for a
    grammar that is wrong, longer than ``MAX_CHARS`` or too costly.
    """

    def __init__(self, tokenizer_json: str, cfg: Config):
        """The text of a tokenizer.json whose ids end below ``vocab_size``."""
        self.cfg = cfg
        vocabulary = {
            "tokenizer": _markup_is_special(tokenizer_json),
            "n_vocab": cfg.vocab_size,
            "eos_token": cfg.eos_token_id,
        }
        self._tokenizer = LLTokenizer(**vocabulary)
        self._probe = Probe(vocabulary)
        self._executor = LLExecutor()
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self.all_but_end = everything(1, cfg.vocab_size)[0]
        end = cfg.eos_token_id
        self.all_but_end[end // 32] &= ~np.int32(1 << end % 32)

    @classmethod
    def from_dir(cls, directory: Path | str, cfg: Config) -> "Grammars":
        """For the tokenizer.json of a checkpoint, which must have been read before."""
        return cls((Path(directory) / "tokenizer.json").read_text("utf-8"), cfg)

    def json_schema(self, schema: dict[str, Any] | str) -> Grammar:
        """JSON that is valid for a schema; a keyword that cannot be enforced is an error."""
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(schema, allow_nan=False)
            source = LLMatcher.grammar_from_json_schema(text, defaults=_BLANKS)
        except RecursionError:
            raise UserError("grammar: the schema is nested too deeply") from None
        except ValueError as error:
            raise UserError(f"grammar: the schema is not valid JSON: {error}") from None
        return self._compiled(source)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return self._compiled(LLMatcher.grammar_from_regex(pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if not texts:
            raise UserError("grammar: there must be at least one choice")
        return self.lark("start: " + " | ".join(json.dumps(text) for text in texts))

    def lark(self, text: str) -> Grammar:
        """What a grammar in llguidance's variant of Lark describes."""
        return self._compiled(LLMatcher.grammar_from_lark(text))

    def advance(self, moves: Sequence[tuple[Matcher, int]]) -> None:
        """Take the next token of each matcher, then find out what may follow, in parallel."""
        going = [matcher for matcher, token in moves if self._takes(matcher, token)]
        if not going:
            return
        rows = everything(len(going), self.cfg.vocab_size)
        states = [(matcher.state, row) for row, matcher in enumerate(going)]
        fill_next_token_bitmask_par(self._executor, states, rows)
        for matcher, allowed in zip(going, rows, strict=True):
            matcher.allowed, matcher.fault = allowed, fault_of(matcher.state)
            if matcher.fault is None and not allowed.any():
                matcher.fault = "no token of the vocabulary continues the grammar"

    def close(self) -> None:
        """End the process in which grammars are tried; it starts again when needed."""
        self._probe.close()

    def _takes(self, matcher: Matcher, token: int) -> bool:
        """Take a token; whether what follows has to be computed."""
        if matcher.waiting:
            if token == matcher.grammar.after:
                matcher.waiting, matcher.allowed = False, matcher.grammar.first
            return False
        matcher.state.consume_token(token)
        matcher.fault = fault_of(matcher.state)
        matcher.complete = matcher.fault is None and matcher.state.is_stopped()
        return matcher.fault is None and not matcher.complete

    def _compiled(self, source: str) -> Grammar:
        if len(source) > MAX_CHARS:
            raise UserError(f"grammar: {len(source)} characters must be at most {MAX_CHARS}")
        with self._lock:
            if source in self._known:
                self._known.move_to_end(source)
                return self._known[source]
        if fault := self._probe.fault(source):
            raise UserError(f"grammar: {fault}")
        state, first = compiled(self._tokenizer, source)
        grammar = Grammar(self, state, np.frombuffer(first, np.int32)[: len(self.all_but_end)])
        with self._lock:
            self._known[source] = grammar
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return grammar


def _markup_is_special(tokenizer_json: str) -> str:
    """The tokenizer with all added tokens special: role and reasoning marks are no text that an
    answer may hold.
    """
    data = json.loads(tokenizer_json)
    for token in data["added_tokens"]:
        token["special"] = True
    return json.dumps(data)
