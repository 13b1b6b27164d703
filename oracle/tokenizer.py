"""A byte-level BPE tokenizer, quickly trained on a paragraph, with a simple chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
FIRST_ORDINARY_ID = len(SPECIAL_TOKENS)

CORPUS = """
The river rises in the northern hills and flows south for two hundred kilometres before it meets the sea. Its upper
valley was settled in the twelfth century, when monks drained the marshes and built the first stone bridge. A railway
followed in 1871, and with it came paper mills, a brewery and the market square that still stands at the centre of town.
Who built the bridge? When did the railway open? Which town lies at the mouth of the river? Answer the question from the
documents above, and say so when they do not contain the answer. The library holds more than forty thousand books, of
which the oldest was printed in Venice; the museum next to it shows tools, maps and letters from the age of sail. Every
spring the harbour fills with boats, and people from the islands come to sell fish, wool and honey. The population was
12,480 at the last census. In winter the pass is closed by snow, and the mail is carried by sled. Its author was born in
1809, studied law and medicine, and wrote three novels, a history of the province and many poems about the coast.
"""

_TURN = "<|' + message['role'] + '|>"
_STRING_TEMPLATE = (
    "{% for message in messages %}{{ '" + _TURN + "' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_PARTS_TEMPLATE = (
    "{% for message in messages %}{{ '" + _TURN + "' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(path: str | Path, *, add_bos: bool, chat_parts: bool, max_length: int) -> None:
    """Train the tokenizer and save it to folder `path`, where `AutoTokenizer.from_pretrained` loads it offline.

    add_bos: encoding with special tokens starts with <s>, and so does the chat template.
    chat_parts: the chat template loops over the content parts of a message; otherwise content is one string.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS.strip().splitlines(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gives a vocabulary of {tokenizer.get_vocab_size()}, expected {VOCAB_SIZE}")
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    template = _PARTS_TEMPLATE if chat_parts else _STRING_TEMPLATE
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=max_length,
        chat_template="<s>" * add_bos + template,
    ).save_pretrained(path)
