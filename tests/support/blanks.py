"""Tokenizers that put a blank before texts, as those of Llama 2, Mistral and Mixtral, with templates of their kinds."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

BLANKS = ["prepend", "first", "always", "byte level", "never"]
"""Where a tokenizer puts a blank: before each text between special tokens, before a text that begins with none, ..."""
_PLAIN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
_BLANK = _PLAIN.replace("m.content + eos", "' ' + m.content + eos")
TEMPLATES = {
    "no blank before an answer": _PLAIN,
    "a blank before an answer": _BLANK,
    "a blank before an answer, and before its end": "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "special tokens around a question": _BLANK.replace("[INST] ", "<q>").replace(" [/INST]", "</q>"),
    "an answer behind a special token": _PLAIN.replace("[INST] ", "<q>").replace(" [/INST]", "</q>"),
}


def tokenizer_with_blanks(where: str, template: str = _BLANK) -> Any:
    """Make a tokenizer whose merges are a blank and a character behind it."""
    blank = "Ġ" if where == "byte level" else "▁"
    tokens = ["<unk>", "<s>", "</s>", "<q>", "</q>"]
    characters = list("0123456789+-=?#()[]/:.,abcdefghijklmnopqrstuvwxyzINST")
    vocabulary = [*tokens, blank, *characters, *(blank + c for c in characters)]
    merges = [(blank, c) for c in characters]
    made = Tokenizer(models.BPE({t: n for n, t in enumerate(vocabulary)}, merges, unk_token="<unk>", fuse_unk=True))
    if where == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = decoders.Strip(" ", 1, 0)
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    elif where == "byte level":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=where, split=False)
        made.decoder = decoders.Metaspace(prepend_scheme=where, split=False)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    made.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast
