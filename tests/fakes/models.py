"""Tiny models with seeded random weights, a tokenizer for them, and the way back from a spool to what was recorded.

Nothing comes from a hub. Each function builds a fresh model in a few milliseconds and leaves the random state of
the process as it was, so that a test may spoil its model.
"""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import provenance
from provenance.facts import Record, Run
from provenance.journal import records
from provenance.journal.recovery import open_segment
from provenance.journal.spool import segments
from provenance.store import database, queries

VOCABULARY = 64
PAD, BOS, EOS, UNK = range(4)
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
PROMPT = [[5, 6, 7, 8, 9]]
CHARACTERS = string.ascii_letters + " .,:!?-\n"
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def llama(seed: int = 22, **changes: Any) -> Any:
    """Build a Llama of two layers in float32."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3}  # fmt: skip
    return _built(seed, lambda: LlamaForCausalLM(LlamaConfig(**{**SPECIAL, **sizes, **changes})))


def gpt2(seed: int = 21, **changes: Any) -> Any:
    """Build a GPT-2 of two layers: tied embeddings, learned positions, convolutions for projections."""
    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.3,
    }
    return _built(seed, lambda: GPT2LMHeadModel(GPT2Config(**{**SPECIAL, **sizes, **changes})))


def t5(seed: int = 0, **changes: Any) -> Any:
    """Build a T5: an encoder and a decoder."""
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "initializer_factor": 4.0,
    }
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    return _built(seed, lambda: T5ForConditionalGeneration(T5Config(**{**special, **sizes, **changes})))


def twins(seed: int = 22) -> Any:
    """Build a Llama in which token 2n+1 has the very logit of token 2n: each choice is an exact tie."""
    model = llama(seed)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[0::2]
    return model


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5}


def _built(seed: int, make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def letters(chat: bool = False) -> Any:
    """Build a tokenizer of single characters: ``b`` is token 5."""
    vocabulary = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": UNK}
    vocabulary.update({character: number for number, character in enumerate(CHARACTERS, len(vocabulary))})
    backend = Tokenizer(tokenizer_models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if chat:
        made.chat_template = CHAT
    return made


def tensor(*rows: list[int]) -> Any:
    """Make a tensor of token ids, one row an argument; without arguments, the prompt of most tests."""
    return torch.tensor(list(rows) or PROMPT)


# -- what was recorded ------------------------------------------------------------------------------


def runs(db: Path) -> list[Run]:
    """Wait for the hashing of weights, drain the spool, and read every run back, oldest first."""
    assert provenance.flush()
    return stored(db)


def stored(db: Path) -> list[Run]:
    """Read every run of a store, oldest first."""
    engine = database.reading(f"sqlite:///{db}", db)
    try:
        return [queries.load(engine, line.run_id) for line in reversed(queries.log(engine, 10_000))]
    finally:
        engine.dispose()


def last(db: Path) -> Run:
    """Read the newest run back."""
    return runs(db)[-1]


def journal(db: Path) -> list[Record]:
    """Read the records in the spool of a store as they stand, without a store."""
    found: list[Record] = []
    for path in segments(db.with_name(db.name + ".spool")):
        found += [records.read(frame.kind, frame.seq, frame.payload) for frame in open_segment(path).frames()]
    return found
