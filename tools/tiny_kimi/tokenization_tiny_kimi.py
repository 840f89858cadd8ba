"""A byte-level tiktoken tokenizer of 416 tokens with Kimi's special tokens.

Copied into the verifier's directory, where ``auto_map`` names it: like Kimi's own it only loads
with ``trust_remote_code``.
"""

import base64

import tiktoken
from transformers import PreTrainedTokenizer

_PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
_VOCAB_SIZE = 416


class TinyKimiTokenizer(PreTrainedTokenizer):
    """Ordinary tokens first, by rank; the named special tokens after them; reserved ones last.

    A token's text is its bytes read as Latin-1, one character a byte.
    """

    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder, **kwargs):
        with open(vocab_file, "rb") as lines:
            pairs = [line.split() for line in lines]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        self._encoding = tiktoken.Encoding(
            "tiny_kimi", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self._texts = {rank: token.decode("latin-1") for token, rank in ranks.items()}
        self._texts |= {int(i): token.content for i, token in added_tokens_decoder.items()}
        for i in range(_VOCAB_SIZE):
            self._texts.setdefault(i, f"<|reserved_token_{i}|>")
        self._ids = {text: i for i, text in self._texts.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return len(self._ids)

    def get_vocab(self):
        return dict(self._ids)

    def _tokenize(self, text, **kwargs):
        return [self._texts[i] for i in self._encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self._ids[token]

    def _convert_id_to_token(self, index):
        return self._texts[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode("utf-8", errors="replace")
