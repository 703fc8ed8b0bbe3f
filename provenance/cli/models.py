"""Models for the demo and the tests that need no hub: one that writes readable text, one that is always nearly tied.

Torch and transformers are imported when a model is asked for: this module is imported by whoever only lists commands.
"""

from importlib.resources import as_file, files
from typing import Any

TWIN_NOISE = 1e-7
TWIN_SCALE = 8.0


def tiny() -> tuple[Any, Any]:
    """Load the tiny trained model in bfloat16, and its tokenizer, which pads on the left.

    ``scripts/train-tiny`` made it: 0.8 M weights, and sentences about Python.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with as_file(files("provenance") / "data" / "tiny") as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval(), tokenizer


def twin_rows(seed: int = 0) -> Any:
    """Make a tiny float32 Llama whose every choice is nearly a tie.

    Each odd row of its head is a copy of the even row before it plus a ten-millionth of noise, so the two best
    logits are some 1e-6 apart: whatever reorders a sum turns tokens, and a repeat of the same call never does. The
    global random state is left as it was.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float().eval()
        head = model.lm_head.weight
        head.mul_(TWIN_SCALE)
        head[1::2] = head[0::2] + TWIN_NOISE * torch.randn(head[0::2].shape)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model
